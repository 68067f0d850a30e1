// Decode attention that reads K/V blocks in place (PagedAttention, arXiv 2309.06180, sec. 4.3); the store of new K/V.
//
// One task is (row, K/V head, part of the sequence); the query heads of a group times the queries of the step are the
// M rows of two small matrix products per tile of 64 tokens, so K and V are read once. float32 but for the loads.
// Parts of a split row are merged by log-sum-exp (Flash-Decoding). No slot outside of a row's visible ranges is read.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "draw.cpp"
#include "hash.cpp"
#include "lanes.cpp"
#include "tiles.cpp"

// Of the call, the step, the layer; strides in elements, dtypes 0 float32, 1 bfloat16, 2 float16.
struct AttentionCall {
    const void* query;
    void* out;
    const void *sinks, *bias;
    int64_t bias_dtype, bias_strides[4], bias_len;
    const int32_t *tables, *seq_lens, *starts;
    int64_t batch, query_len, table_stride, max_blocks, causal, window, threads;
    const void *key, *value;
    int64_t dtype, sinks_dtype, heads, kv_heads, key_dim, value_dim, block_size, num_blocks;
    int64_t query_strides[3], key_strides[3], value_strides[3];
    double scale, softcap;
};

namespace {

constexpr int kNoMemory = 6;  // beside the errors of `plan`
constexpr int64_t kAlone = 1 << 15;  // elements of K and V that one thread reads while others wake

struct Span { int64_t row, head, low, high, partial; };  // partial: slot of an unmerged part, -1 if it is the whole row

float float_at(const void* p, int64_t dtype, int64_t i) {
    if (dtype == 0) return to_float((const float*)p + i);
    return dtype == 1 ? to_float((const BFloat16*)p + i) : to_float((const Float16*)p + i);
}

// Grows, never shrinks; one per thread and use. Null where there is no memory.
struct Scratch {
    std::unique_ptr<float, decltype(&std::free)> memory{nullptr, &std::free};
    size_t size = 0;
    float* get(size_t floats) {
        if (floats > size) {
            const size_t wanted = (floats + 1023) / 1024 * 1024;
            memory.reset(), size = 0;
            memory.reset((float*)std::aligned_alloc(64, wanted * sizeof(float)));
            if (memory) size = wanted;
        }
        return memory.get();
    }
};

struct Kernel {
    const AttentionCall& c;
    const int64_t group = c.heads / c.kv_heads, M = group * c.query_len;
    const int64_t padded = (c.value_dim + kLanes - 1) / kLanes * kLanes;  // of value_dim
    const int64_t part = M * (padded + 2);                               // floats of a part: acc, then max and sum

    // The half-open range that query i sees; empty as low >= high.
    void visible(int64_t row, int64_t i, int64_t& low, int64_t& high) const {
        low = c.starts[row], high = c.seq_lens[row];
        if (!c.causal) return;
        high += i + 1 - c.query_len;
        if (c.window >= 0) low = std::max(low, high - c.window);
    }

    template <class T> void write(const Span& s, float* acc, float* top, float* sum) const {
        for (int64_t m = 0; m < M; ++m) {
            int64_t head = s.head * group + m / c.query_len, i = m % c.query_len;
            float scale = sum[m] > 0 || sum[m] != sum[m] ? 1.f / sum[m] : 0.f;
            if (c.sinks && scale != 0.f) {
                float sink = float_at(c.sinks, c.sinks_dtype, head), high = std::max(sink, top[m]);
                float weight = exp1(top[m] - high);
                scale = weight / (sum[m] * weight + exp1(sink - high));
            }
            T* out = (T*)c.out + ((s.row * c.query_len + i) * c.heads + head) * c.value_dim;
            int64_t d = 0;
            for (; d + kLanes <= c.value_dim; d += kLanes) put_lanes(out + d, load<vf>(acc + m * padded + d) * scale);
            for (; d < c.value_dim; ++d) put(out + d, acc[m * padded + d] * scale);
        }
    }

    template <class T> static const T* tile(const void* blocks, const int64_t* strides, int64_t block, int64_t head) {
        return (const T*)blocks + block * strides[0] + head * strides[1];
    }

    // Inlined by force: GCC takes a function that only prefetches for one without effect, and drops its calls.
    template <class T>
    inline __attribute__((always_inline)) void prefetch(const Span& s, const int32_t* table, int64_t start) const {
        for (int64_t t = start, end = std::min(s.high, start + kTile); t < end;) {
            const int64_t block = table[t / c.block_size], offset = t % c.block_size;
            const int64_t count = std::min(c.block_size - offset, end - t);
            const T* k = tile<T>(c.key, c.key_strides, block, s.head) + offset * c.key_strides[2];
            const T* v = tile<T>(c.value, c.value_strides, block, s.head) + offset * c.value_strides[2];
            for (int64_t i = 0; i < count * c.key_strides[2]; i += 64 / sizeof(T)) __builtin_prefetch(k + i, 0, 2);
            for (int64_t i = 0; i < count * c.value_strides[2]; i += 64 / sizeof(T)) __builtin_prefetch(v + i, 0, 2);
            t += count;
        }
    }

    template <class T> const T* query_at(const Span& s, int64_t m) const {
        return (const T*)c.query + s.row * c.query_strides[0] + m % c.query_len * c.query_strides[2] +
               (s.head * group + m / c.query_len) * c.query_strides[1];
    }

#if HAS_AMX
    static bool has_tiles() { return LANES == 16 && may_use_tiles(); }  // 16 keys at once

    // Queries of bfloat16 as right tiles: [M / 16][key_dim / 32][16 pairs][16 queries][2], zeros where there are none.
    void pair_queries(const Span& s, uint32_t* out) const {
        std::memset(out, 0, (M + 15) / 16 * c.key_dim * 32);
        for (int64_t m = 0; m < M; ++m) {
            const char* from = (const char*)query_at<BFloat16>(s, m);
            uint32_t* to = out + m / 16 * c.key_dim * 8 + m % 16;
            for (int64_t pair = 0; pair < c.key_dim / 2; ++pair) std::memcpy(to + pair * 16, from + 4 * pair, 4);
        }
    }

    // scores[M][kTile] of 16 keys, which are the left tile as they lie in their block.
    void tile_scores(const BFloat16* const* keys, const uint32_t* q, float* scores) const {
        alignas(64) BFloat16 copied[16 * 32];
        alignas(64) float found[256];
        bool together = true;
        for (int t = 1; t < 16; ++t) together &= keys[t] == keys[0] + t * c.key_strides[2];
        const __m512 scale = _mm512_set1_ps((float)c.scale);
        for (int64_t m = 0; m < M; m += 16, q += c.key_dim * 8) {
            _tile_zero(0);
            for (int64_t d = 0; d < c.key_dim; d += 32) {
                if (together) {
                    _tile_loadd(1, keys[0] + d, c.key_strides[2] * 2);
                } else {
                    for (int t = 0; t < 16; ++t) std::memcpy((void*)(copied + t * 32), keys[t] + d, 64);
                    _tile_loadd(1, copied, 64);
                }
                _tile_loadd(2, q + d * 8, 64);
                _tile_dpbf16ps(0, 1, 2);
            }
            _tile_stored(0, found, 64);
            const int64_t count = std::min<int64_t>(16, M - m);
            __m512i rows[16];
            if (count > 4) {
                for (int t = 0; t < 16; ++t) rows[t] = _mm512_load_si512(found + t * 16);
                transpose16(rows);
            }
            for (int64_t i = 0; i < count; ++i) {
                const __m512 row = count > 4 ? _mm512_castsi512_ps(rows[i]) : column16(found + i);
                _mm512_storeu_ps(scores + (m + i) * kTile, _mm512_mul_ps(row, scale));
            }
        }
    }
#else
    static bool has_tiles() { return false; }
    void pair_queries(const Span&, uint32_t*) const {}
#endif

    template <class T> bool run(const Span& s, float* partials) const {  // false: no memory
        static thread_local Scratch scratch;
        const int64_t width = (M + 15) / 16 * 16;  // of the queries as tiles
        float* kt = scratch.get(c.key_dim * kSub + width * c.key_dim + width * kTile + part + M + kTile * padded);
        if (!kt) return false;
        float *q = kt + c.key_dim * kSub, *scores = q + width * c.key_dim, *acc = scores + width * kTile;
        float *top = acc + M * padded, *sum = top + M, *alpha = sum + M, *wide = alpha + M;
        [[maybe_unused]] const bool tiled = std::is_same<T, BFloat16>::value && c.key_dim % 32 == 0 && has_tiles();
        if (tiled) pair_queries(s, (uint32_t*)q);
        for (int64_t m = 0; m < M; ++m) {
            const T* from = query_at<T>(s, m);
            int64_t d = tiled ? c.key_dim : 0;
            for (; d + kLanes <= c.key_dim; d += kLanes)
                store_vf(q + m * c.key_dim + d, load_floats(from + d) * (float)c.scale);
            for (; d < c.key_dim; ++d) q[m * c.key_dim + d] = to_float(from + d) * (float)c.scale;
            top[m] = -kInf, sum[m] = 0.f;
        }
        [[maybe_unused]] const Tiles tiles(tiled, (int)std::min<int64_t>(16, M));
        std::fill(acc, acc + M * padded, 0.f);
        const int64_t steps = (M + kMaxRows - 1) / kMaxRows, step = steps ? (M + steps - 1) / steps : 1;
        const bool dots = M <= kDotRows && c.key_dim % kLanes == 0;
        const int32_t* table = c.tables + s.row * c.table_stride;
        const T *keys[kTile], *values[kTile];
        const float* widened[kTile];
        prefetch<T>(s, table, s.low);
        for (int64_t start = s.low; start < s.high; start += kTile) {
            const int n = (int)std::min<int64_t>(kTile, s.high - start), whole = (n + kSub - 1) / kSub * kSub;
            for (int t = 0; t < n;) {
                int64_t block = table[(start + t) / c.block_size], offset = (start + t) % c.block_size;
                const T* k = tile<T>(c.key, c.key_strides, block, s.head);
                const T* v = tile<T>(c.value, c.value_strides, block, s.head);
                for (; t < n && offset < c.block_size; ++t, ++offset)
                    keys[t] = k + offset * c.key_strides[2], values[t] = v + offset * c.value_strides[2];
            }
            prefetch<T>(s, table, start + kTile);
            for (int t = n; t < whole; ++t) keys[t] = keys[n - 1];  // their scores are masked below
#if HAS_AMX
            for (int t = 0; tiled && t < whole; t += 16)
                tile_scores((const BFloat16**)keys + t, (uint32_t*)q, scores + t);
#endif
            for (int t = 0; !tiled && dots && t < whole; t += kLanes)
                with_rows((int)M, [&](auto rows) {
                    if constexpr (rows() <= kDotRows) dot_rows<rows()>(q, (int)c.key_dim, keys + t, scores + t);
                });
            for (int t = 0; !tiled && !dots && t < whole; t += kSub) {
                transpose_keys(keys + t, (int)c.key_dim, kt);
                transpose_keys(keys + t + kLanes, (int)c.key_dim, kt + kLanes);
                for (int64_t m = 0; m < M; m += step)
                    with_rows((int)std::min(step, M - m), [&](auto rows) {
                        score_rows<rows()>(q + m * c.key_dim, (int)c.key_dim, kt, scores + m * kTile + t);
                    });
            }
            for (int64_t m = 0; m < M; ++m)
                softmax(s, m, start, n, whole, scores + m * kTile, top[m], sum[m], alpha[m]);
            if (c.value_dim == padded) {
                add_values(values, n, step, scores, alpha, acc);
            } else {
                for (int t = 0; t < n; ++t) {
                    widened[t] = wide + t * padded;
                    for (int64_t d = 0; d < padded; ++d)
                        wide[t * padded + d] = d < c.value_dim ? to_float(values[t] + d) : 0.f;
                }
                add_values(widened, n, step, scores, alpha, acc);
            }
        }
        if (s.partial < 0) write<T>(s, acc, top, sum);
        else std::memcpy(partials + s.partial * part, acc, part * sizeof(float));
        return true;
    }

    template <class V>
    void add_values(const V* const* values, int n, int64_t step, float* scores, float* alpha, float* acc) const {
        for (int64_t m = 0; m < M; m += step)
            with_rows((int)std::min(step, M - m), [&](auto rows) {
                constexpr int kWide = LANES == 16 && rows() <= 4 ? 4 : 2;  // as registers allow
                for (int64_t d = 0, wide; d < padded; d += wide * kLanes) {
                    const int64_t left = (padded - d) / kLanes;
                    wide = left >= kWide ? kWide : left >= 2 ? 2 : 1;
                    auto add = wide == kWide ? value_rows<V, kWide, rows()> : value_rows<V, 2, rows()>;
                    if (wide == 1) add = value_rows<V, 1, rows()>;
                    add(scores + m * kTile, n, values, (int)d, alpha + m, acc + m * padded + d, (int)padded);
                }
            });
    }

    // One row of scores to weights, in place, and its running maximum and sum; alpha rescales what came before.
    void softmax(const Span& s, int64_t m, int64_t start, int n, int whole, float* x, float& top, float& sum,
                 float& alpha) const {
        int64_t low, high, i = m % c.query_len, head = s.head * group + m / c.query_len;
        visible(s.row, i, low, high);
        const int from = (int)std::clamp<int64_t>(low - start, 0, n);
        const int to = (int)std::clamp<int64_t>(high - start, from, n);
        if (c.softcap > 0)
            for (int t = 0; t < whole; t += kLanes)
                store_vf(x + t, tanh16(load<vf>(x + t) * (float)(1 / c.softcap)) * (float)c.softcap);
        if (c.bias) {
            int64_t at = s.row * c.bias_strides[0] + head * c.bias_strides[1] + i * c.bias_strides[2];
            if (c.bias_dtype == 0 && c.bias_strides[3] == 1) {
                const float* bias = (const float*)c.bias + at + start;
                for (int t = from; t < to; ++t) x[t] += bias[t];
            } else {
                for (int t = from; t < to; ++t)
                    x[t] += float_at(c.bias, c.bias_dtype, at + (start + t) * c.bias_strides[3]);
            }
        }
        std::fill(x, x + from, -kInf);
        std::fill(x + to, x + whole, -kInf);
        vf lanes = splat(top);
        for (int t = 0; t < whole; t += kLanes) lanes = larger(load<vf>(x + t), lanes);
        const float next = reduce(lanes, larger);
        alpha = 1.f;
        // Nothing but -inf so far would make -inf - -inf; a NaN score must go on to poison its own query.
        const float base = next == -kInf ? 0.f : next;
        if (next != top) alpha = exp1(top - base);
        vf total = {};
        for (int t = 0; t < whole; t += kLanes) {
            vf p = exp16(load<vf>(x + t) - base);
            total += p;
            store_vf(x + t, p);
        }
        sum = sum * alpha + reduce(total, plus);
        top = next;
    }

    // Parts of one (row, head), merged into the first and written.
    template <class T> void merge(const Span* first, int64_t parts, float* partials) const {
        float *acc = partials + first->partial * part, *top = acc + M * padded, *sum = top + M;
        for (int64_t p = 1; p < parts; ++p) {
            const float *acc2 = acc + p * part, *top2 = acc2 + M * padded, *sum2 = top2 + M;
            for (int64_t m = 0; m < M; ++m) {
                float high = std::max(top[m], top2[m]), base = high == -kInf ? 0.f : high;
                float a = exp1(top[m] - base), b = exp1(top2[m] - base);
                for (int64_t d = 0; d < padded; ++d)
                    acc[m * padded + d] = acc[m * padded + d] * a + acc2[m * padded + d] * b;
                sum[m] = sum[m] * a + sum2[m] * b;
                top[m] = high;
            }
        }
        write<T>(*first, acc, top, sum);
    }

    // 0, or an error of attention.py.
    int plan(std::vector<Span>& spans, int64_t& partials, int64_t& total) const {
        std::vector<std::pair<int64_t, int64_t>> ranges(c.batch);
        for (int64_t row = 0; row < c.batch; ++row) {
            int64_t low = std::numeric_limits<int64_t>::max(), high = 0, a, b;
            for (int64_t i = 0; i < c.query_len; ++i) {
                visible(row, i, a, b);
                if (a < b) low = std::min(low, a), high = std::max(high, b);
            }
            low = std::min(low, high);
            if (low < 0) return 5;
            if (high > c.max_blocks * c.block_size) return 1;
            if (c.bias && high > c.bias_len) return 3;
            for (int64_t i = low / c.block_size; i * c.block_size < high; ++i)
                if (uint64_t(c.tables[row * c.table_stride + i]) >= uint64_t(c.num_blocks)) return 2;
            ranges[row] = {low, high};
            total += (high - low) * c.kv_heads;
        }
        // Four tasks a thread even out ragged rows; a part below 256 tokens would not pay for its merge.
        int64_t longest = c.threads == 1 ? total : std::max<int64_t>(256, total / (4 * c.threads));
        for (int64_t row = 0; row < c.batch; ++row) {
            auto [low, high] = ranges[row];
            int64_t parts = longest ? std::max<int64_t>(1, (high - low + longest - 1) / longest) : 1;
            int64_t size = std::max<int64_t>(1, ((high - low + parts - 1) / parts + kTile - 1) / kTile * kTile);
            parts = std::max<int64_t>(1, (high - low + size - 1) / size);
            for (int64_t head = 0; head < c.kv_heads; ++head)
                for (int64_t p = 0; p < parts; ++p)
                    spans.push_back({row, head, low + p * size, std::min(high, low + (p + 1) * size),
                                     parts > 1 ? partials++ : -1});
        }
        return 0;
    }

    template <class T> int execute() const {
        static thread_local std::vector<Span> spans;
        static thread_local Scratch storage;
        spans.clear();
        int64_t num_partials = 0, total = 0;
        if (int error = plan(spans, num_partials, total)) return error;
        float* partials = num_partials ? storage.get(num_partials * part) : nullptr;
        if (num_partials && !partials) return kNoMemory;
        const Span* tasks = spans.data();  // thread_local: the workers must see the caller's
        const int64_t count = (int64_t)spans.size();
        [[maybe_unused]] const bool shared = c.threads > 1 && count > 1 && total * (c.key_dim + c.value_dim) > kAlone;
        std::atomic<bool> failed{false};
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)c.threads) if (shared)
        for (int64_t i = 0; i < count; ++i)
            if (!run<T>(tasks[i], partials)) failed.store(true, std::memory_order_relaxed);
        if (failed) return kNoMemory;
        for (int64_t i = 0, j; num_partials && i < count; i = j) {
            for (j = i + 1; j < count && tasks[j].row == tasks[i].row && tasks[j].head == tasks[i].head;) ++j;
            if (tasks[i].partial >= 0) merge<T>(tasks + i, j - i, partials);
        }
        return 0;
    }
};

}  // namespace

extern "C" int hf_paged_attention(const AttentionCall* call) {
    const AttentionCall& c = *call;  // attention.py has checked sizes and dtypes; a tensor may have lost its memory
    if (c.query_len < 0) return 4;
    if (!(c.batch && c.heads && c.query_len && c.value_dim)) return 0;
    if (!(c.query && c.out && c.seq_lens && c.starts)) return 4;
    if ((c.num_blocks && !(c.key && c.value)) || (c.max_blocks && !c.tables)) return 4;
    Kernel kernel{c};
    try {
        if (c.dtype == 0) return kernel.execute<float>();
        return c.dtype == 1 ? kernel.execute<BFloat16>() : kernel.execute<Float16>();
    } catch (const std::bad_alloc&) {
        return kNoMemory;
    }
}

#include "linear.cpp"
#include "rows.cpp"

// Strides in bytes; slots[B][n], contiguous, a negative one is not stored.
struct StoreCall {
    const char* source[2];
    const int64_t* slots;
    char* blocks[2];
    int64_t batch, kv_heads, tokens, block_size, num_slots;
    int64_t source_strides[2][3], block_strides[2][3], bytes[2];
};

extern "C" int hf_paged_store(const StoreCall* call) {
    const StoreCall& c = *call;
    if (!(c.batch && c.kv_heads && c.tokens)) return 0;
    if (!c.slots) return 4;
    for (int which = 0; which < 2; ++which)
        if (c.bytes[which] && (!c.source[which] || (c.num_slots && !c.blocks[which]))) return 4;
    for (int64_t i = 0; i < c.batch * c.tokens; ++i)
        if (c.slots[i] >= c.num_slots) return 2;
    for (int which = 0; which < 2; ++which)
        for (int64_t b = 0; b < c.batch; ++b)
            for (int64_t t = 0; t < c.tokens; ++t) {
                const int64_t slot = c.slots[b * c.tokens + t], block = slot / c.block_size;
                if (slot < 0) continue;
                const int64_t *source = c.source_strides[which], *target = c.block_strides[which];
                const char* from = c.source[which] + b * source[0] + t * source[2];
                char* to = c.blocks[which] + block * target[0] + slot % c.block_size * target[2];
                for (int64_t h = 0; h < c.kv_heads; ++h)
                    std::memcpy(to + h * target[1], from + h * source[1], c.bytes[which]);
            }
    return 0;
}

// Strides in bytes; column `first + i` of a row is its token `first + i - origins[row]`, zeros where that is negative.
struct GatherCall {
    const char* blocks;
    char* out;  // [rows][heads][length], `bytes` each
    int64_t heads, num_blocks, strides[3], bytes;
    const int32_t *tables, *origins;
    int64_t rows, first, length, table_stride, max_blocks, block_size, threads;
};

extern "C" int hf_paged_gather(const GatherCall* call) {
    const GatherCall& c = *call;
    if (!(c.rows && c.heads && c.length && c.bytes)) return 0;
    if (!c.blocks || !c.out || !c.origins || (c.max_blocks && !c.tables)) return 4;
    for (int64_t row = 0; row < c.rows; ++row) {
        const int64_t end = c.first + c.length - c.origins[row];
        const int64_t used = end > 0 ? (end + c.block_size - 1) / c.block_size : 0;
        if (used > c.max_blocks) return 1;
        for (int64_t i = 0; i < used; ++i) {
            const int64_t block = c.tables[row * c.table_stride + i];
            if (block < 0 || block >= c.num_blocks) return 2;
        }
    }
    [[maybe_unused]] const bool shared = c.threads > 1 && c.rows * c.heads * c.length * c.bytes > (1 << 18);
#pragma omp parallel for collapse(2) num_threads((int)c.threads) if (shared)
    for (int64_t row = 0; row < c.rows; ++row)
        for (int64_t head = 0; head < c.heads; ++head) {
            char* out = c.out + (row * c.heads + head) * c.length * c.bytes;
            const int64_t begin = c.first - c.origins[row], end = begin + c.length;
            const int64_t hidden = std::min(std::max<int64_t>(0, -begin), c.length);
            std::memset(out, 0, hidden * c.bytes);
            out += hidden * c.bytes;
            for (int64_t t = begin + hidden, count; t < end; t += count, out += count * c.bytes) {
                const int64_t offset = t % c.block_size, block = c.tables[row * c.table_stride + t / c.block_size];
                const char* from = c.blocks + block * c.strides[0] + head * c.strides[1] + offset * c.strides[2];
                count = std::min(c.block_size - offset, end - t);
                if (c.strides[2] == c.bytes)
                    std::memcpy(out, from, count * c.bytes);
                else
                    for (int64_t i = 0; i < count; ++i)
                        std::memcpy(out + i * c.bytes, from + i * c.strides[2], c.bytes);
            }
        }
    return 0;
}
