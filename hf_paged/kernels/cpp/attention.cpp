// Included by kernels.cpp: attention that reads K/V blocks in place (PagedAttention, arXiv 2309.06180, sec. 4.3), for
// decodes, chunks and whole prompts.
//
// One task is (some queries of a row, K/V head): the query heads of a group times these queries are the M rows of two
// small matrix products per tile of 64 tokens, so that K and V are read once for all of them. Tiles and parts begin
// where position + origin is a multiple of kTile or kPart. Each query sums the tiles of a part one after the other, then
// merges the parts by log-sum-exp (Flash-Decoding). This order does not depend on how rows are cut into tasks. With
// `is_fixed`, the choice of instructions does not depend on M either, so the result is the same bit for bit. Decodes
// whose tables begin with the same blocks share a task that reads these blocks once (Hydragen, arXiv 2402.05099), and
// continue from its sums. Computes in float32; on CPUs with instructions for bfloat16, these sum products of bfloat16
// in pairs. Never reads a slot that no query of its row sees.

// Fields of the call, the step and the layer, in this order. Strides in elements; dtypes: 0 float32, 1 bfloat16, 2
// float16. Keys and values are `stored` in the queries' dtype (0), or as codes, Int8, E4M3 or E5M2 (1, 2, 3). The
// scales of a head's block begin `key_scales` and `value_scales` bytes after its first code; the keys' scales multiply the
// scores, and the values' scales multiply the softmax weights.
struct AttentionCall {
    const void* query;
    void* out;
    const void *sinks, *bias;
    int64_t bias_dtype, bias_strides[4], bias_len;
    // without query_start each row has query_len queries; without origins all origins are 0
    const int32_t *tables, *seq_lens, *starts, *query_start, *origins;
    int64_t batch, query_len, table_stride, max_blocks, causal, window, threads, path, is_fixed;
    const void *key, *value;
    int64_t dtype, sinks_dtype, heads, kv_heads, key_dim, value_dim, block_size, num_blocks;
    int64_t num_tokens, query_strides[2], key_strides[3], value_strides[3];
    int64_t stored, key_scales, value_scales;
    double scale, softcap;
};

namespace {

constexpr int kNoMemory = 6;  // an error number; `plan` returns the others
constexpr int64_t kAlone = 1 << 15;  // elements of K and V up to which one thread is faster than several
constexpr int64_t kPart = 512;       // tokens of a part; parts are summed separately
constexpr int64_t kFewRows = 8;      // up to this M, memory is the bottleneck: rounding weights to pairs saves no time
constexpr int64_t kTaskRows = 128;   // maximum M of a task, unless a single query has more rows
// Values are widened in registers, once per group of rows of M, if there are at most this many such groups and value_dim
// is a multiple of kLanes; otherwise they are widened once, to memory.
template <class T> constexpr int kWidenings = std::is_same<T, Int8>::value ? 2 : 1;

// A query that sees positions [low, high) of its row's table. For positions before `shared`, the sums of `members`
// queries are computed together. These sums begin at offset `state`; `place` is this query's index among the members.
struct Query { int64_t token, row, i, low, high, shared, state, members, place; };
// Queries [first, first + count) over [low, high). The sums go to offset `state`; if it is negative, the results go to
// the output.
struct Task { int64_t head, first, count, low, high, state; };
struct Sums { float *acc, *top, *sum; };  // [M][padded], [M], [M]

float float_at(const void* p, int64_t dtype, int64_t i) {
    if (dtype == 0) return to_float((const float*)p + i);
    return dtype == 1 ? to_float((const BFloat16*)p + i) : to_float((const Float16*)p + i);
}

// Memory that grows and never shrinks, one per thread and use. `get` returns null if memory runs out.
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
    template <class X> static X* take(float*& at, int64_t count) {  // advances by a multiple of 64 bytes
        X* found = (X*)at;
        at += (count * (int64_t)sizeof(X) + 63) / 64 * 16;
        return found;
    }
};

// The rows of a call, cut into tasks.
struct Plan {
    std::vector<Query> queries;
    std::vector<Task> shared, tasks;   // `shared` run first
    std::vector<int64_t> order;        // queries whose rows may share blocks
    int64_t states = 0, work = 0;      // floats of states; tokens read, over all heads
    void clear() { queries.clear(), shared.clear(), tasks.clear(), order.clear(), states = work = 0; }
};

struct Kernel {
    const AttentionCall& c;
    const int64_t group = c.heads / c.kv_heads;
    const int64_t padded = (c.value_dim + kLanes - 1) / kLanes * kLanes;  // value_dim, rounded up

    int64_t state_floats(int64_t queries) const { return group * queries * (padded + 2); }
    Sums sums_at(float* p, int64_t M) const { return {p, p + M * padded, p + M * (padded + 1)}; }
    int64_t origin(int64_t row) const { return c.origins ? c.origins[row] : 0; }
    int64_t part_end(int64_t t, int64_t origin) const { return ((t + origin) / kPart + 1) * kPart - origin; }
    int64_t num_parts(int64_t low, int64_t high, int64_t origin) const {
        return high > low ? (high - 1 + origin) / kPart - (low + origin) / kPart + 1 : 1;
    }

    // -- the plan -----------------------------------------------------------------------------------------------------

    // Returns 0, or an error number (`Attention._exception` in attention.py).
    int plan(Plan& p) const {
        std::vector<Query>& queries = p.queries;
        for (int64_t row = 0, token = 0; row < c.batch; ++row) {
            const int64_t count = c.query_start ? c.query_start[row + 1] - c.query_start[row] : c.query_len;
            if (count < 0 || token + count > c.num_tokens || origin(row) < 0) return 4;
            const size_t first = queries.size();
            int64_t low = std::numeric_limits<int64_t>::max(), high = 0;
            for (int64_t i = 0; i < count; ++i) {
                int64_t a = c.starts[row], b = c.seq_lens[row];
                if (c.causal) b += i + 1 - count, a = c.window >= 0 ? std::max(a, b - c.window) : a;
                if (a < b) low = std::min(low, a), high = std::max(high, b);
                queries.push_back({token + i, row, i, a, std::max(a, b), 0, 0, 0, 0});
            }
            token += count;
            if (!count) continue;
            low = std::min(low, high);
            if (low < 0) return 5;
            if (high > c.max_blocks * c.block_size) return 1;
            if (c.bias && high > c.bias_len) return 3;
            for (int64_t i = low / c.block_size; i * c.block_size < high; ++i)
                if (uint64_t(c.tables[row * c.table_stride + i]) >= uint64_t(c.num_blocks)) return 2;
            if (count == 1 && !low && high > kTile && !origin(row)) p.order.push_back((int64_t)first);
        }
        const int64_t rows = (int64_t)queries.size();
        share(p);
        for (int64_t first = 0, last; first < rows; first = last) {
            for (last = first + 1; last < rows && queries[last].row == queries[first].row;) ++last;
            cut(p, first, last);
        }
        return 0;
    }

    // Makes the tasks of the queries [first, last) of a row.
    void cut(Plan& p, int64_t first, int64_t last) const {
        const int64_t step = std::max<int64_t>(1, kTaskRows / group), row = p.queries[first].row;
        // whether each part becomes a task, because the rows alone give too few tasks for all threads
        const bool splits = c.threads > 1 && c.batch * c.kv_heads < 4 * c.threads && last - first <= 4 * step;
        for (int64_t head = 0; head < c.kv_heads; ++head)
            for (int64_t at = first; at < last; at += step) {
                Task task{head, at, std::min(step, last - at), std::numeric_limits<int64_t>::max(), 0, -1};
                for (int64_t i = at; i < at + task.count; ++i)
                    if (const Query& q = p.queries[i]; q.low < q.high)
                        task.low = std::min(task.low, q.low), task.high = std::max(task.high, q.high);
                task.low = std::min(task.low, task.high);
                p.work += task.high - std::max(task.low, p.queries[at].shared);
                const bool one = !splits || p.queries[at].shared || num_parts(task.low, task.high, origin(row)) < 2;
                for (int64_t low = task.low, end = task.high; !one && low < end; low = task.high) {
                    task.low = low, task.high = std::min(end, part_end(low, origin(row)));
                    task.state = p.states, p.states += state_floats(task.count);
                    p.tasks.push_back(task);
                }
                if (one) p.tasks.push_back(task);
            }
    }

    // Finds decodes whose tables begin with the same blocks, and makes tasks of the whole tiles that they share.
    void share(Plan& p) const {
        auto table = [&](int64_t query) { return c.tables + p.queries[query].row * c.table_stride; };
        std::stable_sort(p.order.begin(), p.order.end(), [&](int64_t a, int64_t b) { return *table(a) < *table(b); });
        const int64_t most = std::max<int64_t>(2, kTaskRows / group), rows = (int64_t)p.order.size();
        for (int64_t first = 0, last; first < rows; first = last) {
            const int32_t* one = table(p.order[first]);
            int64_t blocks = p.queries[p.order[first]].high / c.block_size;
            for (last = first + 1; last < rows && last - first < most; ++last) {
                const int32_t* other = table(p.order[last]);
                int64_t same = 0, limit = std::min(blocks, p.queries[p.order[last]].high / c.block_size);
                while (same < limit && one[same] == other[same]) ++same;
                if (same * c.block_size < kTile) break;
                blocks = same;
            }
            const int64_t end = blocks * c.block_size / kTile * kTile, count = last - first;
            if (count < 2) continue;
            const int64_t members = (int64_t)p.queries.size();
            for (int64_t place = 0; place < count; ++place) {
                Query& query = p.queries[p.order[first + place]];
                query.shared = end, query.state = p.states, query.members = count, query.place = place;
                Query member = query;
                member.high = end, member.shared = 0;
                p.queries.push_back(member);  // invalidates `query`
            }
            for (int64_t head = 0; head < c.kv_heads; ++head)
                for (int64_t low = 0; low < end; low += kPart) {
                    p.shared.push_back({head, members, count, low, std::min(end, low + kPart), p.states});
                    p.states += state_floats(count);
                }
            p.work += end * c.kv_heads;
        }
    }

    // -- a task -------------------------------------------------------------------------------------------------------

    // Calls f with a null pointer of the queries' type, given keys and values of type T.
    template <class T, class F> void with_queries(F f) const {
        if constexpr (!kIsCode<T>) f((T*)nullptr);
        else if (c.dtype == 0) f((float*)nullptr);
        else if (c.dtype == 1) f((BFloat16*)nullptr);
        else f((Float16*)nullptr);
    }

    template <class T> void write(const Task& s, const Query* queries, Sums x) const {
        for (int64_t m = 0; m < group * s.count; ++m) {
            const int64_t head = s.head * group + m / s.count;
            float scale = x.sum[m] > 0 || x.sum[m] != x.sum[m] ? 1.f / x.sum[m] : 0.f;
            if (c.sinks && scale != 0.f) {
                const float sink = float_at(c.sinks, c.sinks_dtype, head), high = std::max(sink, x.top[m]);
                const float weight = exp1(x.top[m] - high);
                scale = weight / (x.sum[m] * weight + exp1(sink - high));
            }
            T* out = (T*)c.out + (queries[s.first + m % s.count].token * c.heads + head) * c.value_dim;
            const float* acc = x.acc + m * padded;
            int64_t d = 0;
            for (; d + kLanes <= c.value_dim; d += kLanes) put_lanes(out + d, load<vf>(acc + d) * scale);
            for (; d < c.value_dim; ++d) put(out + d, acc[d] * scale);
        }
    }

    template <class T> void write_out(const Task& s, const Query* queries, Sums x) const {
        with_queries<T>([&](auto* type) { write<std::remove_pointer_t<decltype(type)>>(s, queries, x); });
    }

    // Merges the sums y of a part into the sums x of the parts before it.
    void merge(int64_t M, Sums x, Sums y) const {
        for (int64_t m = 0; m < M; ++m) {
            const float high = std::max(x.top[m], y.top[m]), base = high == -kInf ? 0.f : high;
            const float a = exp1(x.top[m] - base), b = exp1(y.top[m] - base);
            for (int64_t d = m * padded; d < (m + 1) * padded; d += kLanes)
                store_vf(x.acc + d, load<vf>(x.acc + d) * a + load<vf>(y.acc + d) * b);
            x.sum[m] = x.sum[m] * a + y.sum[m] * b;
            x.top[m] = high;
        }
    }

    // Loads the sums of one query over the tiles of a shared part.
    void resume(const Query& q, int64_t head, int64_t part, float* states, Sums x) const {
        const int64_t M = group * q.members, parts = num_parts(0, q.shared, 0);
        const Sums from = sums_at(states + q.state + (head * parts + part) * state_floats(q.members), M);
        for (int64_t g = 0; g < group; ++g) {
            const int64_t m = g * q.members + q.place;
            std::memcpy(x.acc + g * padded, from.acc + m * padded, padded * sizeof(float));
            x.top[g] = from.top[m], x.sum[g] = from.sum[m];
        }
    }

    template <class T> static const T* tile(const void* blocks, const int64_t* strides, int64_t block, int64_t head) {
        return (const T*)blocks + block * strides[0] + head * strides[1];
    }

    // The memory of a task, and its choice of instructions.
    template <class T> struct Work {
        const Task& s;
        const Query* queries;
        const int32_t* table;
        int64_t upcoming = 0;  // where the next tile begins
        const int64_t M, step;  // rows of M at once
        const bool tiled, paired, pairs_values, dots;
        const T *keys[kTile], *values[kTile];
        float key_scales[kIsCode<T> ? kTile : 1], value_scales[kIsCode<T> ? kTile : 1];  // of codes
        float *q, *kt, *scores, *alpha, *wide;  // q and kt hold pairs if products are of pairs
        Sums first, next;

        Work(const Kernel& k, const Task& task, const Query* all)
            : s(task), queries(all), table(k.c.tables + all[task.first].row * k.c.table_stride),
              M(k.group * task.count), step(even_step(M)), tiled(k.has_tiles<T>()),
              paired(!tiled && k.pairs_keys<T>()), pairs_values(k.pairs_values<T>() && (k.c.is_fixed || M > kFewRows)),
              dots(!tiled && !paired && !k.c.is_fixed && M <= kDotRows && k.c.key_dim % kLanes == 0) {}
        static int64_t even_step(int64_t M) {
            const int64_t steps = (M + kMaxRows - 1) / kMaxRows;
            return steps ? (M + steps - 1) / steps : 1;
        }
        bool allocate(const Kernel& k) {
            static thread_local Scratch scratch;
            const int64_t rows = (M + 15) / 16 * 16, dim = k.c.key_dim, sums = rows * (k.padded + 2);
            float* at = scratch.get(rows * (dim + kTile + 1) + dim * kTile + kTile * k.padded + 2 * sums + 128);
            if (!at) return false;
            q = Scratch::take<float>(at, rows * dim), scores = Scratch::take<float>(at, rows * kTile);
            kt = Scratch::take<float>(at, dim * kTile), wide = Scratch::take<float>(at, kTile * k.padded);
            alpha = Scratch::take<float>(at, rows);
            first = k.sums_at(Scratch::take<float>(at, sums), M), next = k.sums_at(Scratch::take<float>(at, sums), M);
            return true;
        }
    };

    // Prefetches keys or values of `count` tokens from position `start` on. A processor tracks few cache misses at a
    // time, so each call requests little. Inlined by force: GCC considers a function that only prefetches to have no
    // effect, and drops its calls.
    template <class T>
    inline __attribute__((always_inline)) void prefetch(const Task& s, const int32_t* table, const void* blocks,
                                                        const int64_t* strides, int64_t scales, int64_t start,
                                                        int64_t count) const {
        for (int64_t t = std::max(s.low, start), end = std::min(s.high, start + count); t < end;) {
            const int64_t offset = t % c.block_size, here = std::min(c.block_size - offset, end - t);
            const T* p = tile<T>(blocks, strides, table[t / c.block_size], s.head) + offset * strides[2];
            for (int64_t i = 0; i < here * strides[2]; i += 64 / sizeof(T)) __builtin_prefetch(p + i, 0, 2);
            if (kIsCode<T>) __builtin_prefetch((const char*)(p - offset * strides[2]) + scales + offset * 4, 0, 2);
            t += here;
        }
    }
    // These prefetch `count` tokens of the next tile, from its token `t` on.
    template <class T> inline __attribute__((always_inline)) void prefetch_keys(const Work<T>& w, int t, int count) const {
        prefetch<T>(w.s, w.table, c.key, c.key_strides, c.key_scales, w.upcoming + t, count);
    }
    template <class T>
    inline __attribute__((always_inline)) void prefetch_values(const Work<T>& w, int64_t t, int64_t count) const {
        prefetch<T>(w.s, w.table, c.value, c.value_strides, c.value_scales, w.upcoming + t, count);
    }

    template <class T> const T* query_at(const Task& s, const Query* queries, int64_t m) const {
        return (const T*)c.query + queries[s.first + m % s.count].token * c.query_strides[1] +
               (s.head * group + m / s.count) * c.query_strides[0];
    }

    // Whether products of bfloat16 with keys, and with values, are computed in pairs.
    template <class T> bool pairs_keys() const {
        return HAS_PAIRS && std::is_same<T, BFloat16>::value && c.path >= kDots && c.key_dim % 2 == 0 && c.key_dim >= 32;
    }
    template <class T> bool pairs_values() const {
        return HAS_PAIRS && std::is_same<T, BFloat16>::value && c.path >= kDots && c.value_dim % 16 == 0;
    }

#if HAS_AMX
    // Whether AMX tiles compute the scores, for 16 keys at a time.
    template <class T> bool has_tiles() const {
        return std::is_same<T, BFloat16>::value && LANES == 16 && c.path >= kTiles && c.key_dim % 32 == 0 &&
               may_use_tiles();
    }

    // Writes queries of bfloat16 as right-hand tiles: [M / 16][key_dim / 32][16 pairs][16 queries][2], padded with zeros.
    void pair_queries(const Task& s, const Query* queries, uint32_t* out) const {
        const int64_t M = group * s.count;
        std::memset(out, 0, (M + 15) / 16 * c.key_dim * 32);
        for (int64_t m = 0; m < M; ++m) {
            const char* from = (const char*)query_at<BFloat16>(s, queries, m);
            uint32_t* to = out + m / 16 * c.key_dim * 8 + m % 16;
            for (int64_t pair = 0; pair < c.key_dim / 2; ++pair) std::memcpy(to + pair * 16, from + 4 * pair, 4);
        }
    }

    // Computes the scores of 16 keys, to rows of scores[M][kTile]. The keys are the left-hand tile: read from their block
    // if they are adjacent there, otherwise copied first.
    void tile_scores(int64_t M, const BFloat16* const* keys, const uint32_t* q, float* scores) const {
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
    template <class T> bool has_tiles() const { return false; }
    void pair_queries(const Task&, const Query*, uint32_t*) const {}
    void tile_scores(int64_t, const BFloat16* const*, const uint32_t*, float*) const {}
#endif

    template <class Q, class T> void load_queries(Work<T>& w) const {
        if (w.tiled) return pair_queries(w.s, w.queries, (uint32_t*)w.q);
        for (int64_t m = 0; m < w.M; ++m) {
            const Q* from = query_at<Q>(w.s, w.queries, m);
            if (w.paired) {
                std::memcpy((char*)w.q + m * c.key_dim * 2, (const void*)from, c.key_dim * 2);
                continue;
            }
            float* to = w.q + m * c.key_dim;
            int64_t d = 0;
            for (; d + kLanes <= c.key_dim; d += kLanes) store_vf(to + d, load_floats(from + d) * (float)c.scale);
            for (; d < c.key_dim; ++d) to[d] = to_float(from + d) * (float)c.scale;
        }
    }

    template <class T> bool run(const Task& s, const Query* queries, float* states) const {  // false: out of memory
        Work<T> w(*this, s, queries);
        if (!w.allocate(*this)) return false;
        with_queries<T>([&](auto* type) { load_queries<std::remove_pointer_t<decltype(type)>>(w); });
        [[maybe_unused]] const Tiles tiles(w.tiled, (int)std::min<int64_t>(16, w.M));
        const Query& one = queries[s.first];
        const int64_t start = origin(one.row);
        w.upcoming = std::max(s.low, one.shared);
        prefetch_keys(w, 0, kTile), prefetch_values(w, 0, kTile);
        for (int64_t low = s.low, end, part = 0;; low = end, ++part) {
            end = std::min(s.high, part_end(low, start));
            const Sums sums = part ? w.next : w.first;
            int64_t from = low;
            if (low < one.shared) {
                resume(one, s.head, part, states, sums), from = std::min(end, one.shared);
            } else {
                std::fill(sums.acc, sums.acc + w.M * padded, 0.f);
                std::fill(sums.top, sums.top + w.M, -kInf), std::fill(sums.sum, sums.sum + w.M, 0.f);
            }
            for (int64_t at = (from + start) / kTile * kTile - start; from < end; from = at += kTile)
                add_tile(w, at, (int)(from - at), (int)std::min<int64_t>(kTile, end - at), sums);
            if (part) merge(w.M, w.first, w.next);
            if (end >= s.high) break;
        }
        if (s.state < 0) write_out<T>(s, queries, w.first);
        else std::memcpy(states + s.state, w.first.acc, state_floats(s.count) * sizeof(float));
        return true;
    }

    // Adds tokens [from, to) of the tile that begins at `at` to the sums.
    template <class T>
    void add_tile(Work<T>& w, int64_t at, int from, int to, Sums sums) const {
        const int low = from / kSub * kSub, whole = (to + kSub - 1) / kSub * kSub;
        w.upcoming = at + kTile;
        for (int t = from; t < to;) {
            int64_t block = w.table[(at + t) / c.block_size], offset = (at + t) % c.block_size;
            const T* k = tile<T>(c.key, c.key_strides, block, w.s.head);
            const T* v = tile<T>(c.value, c.value_strides, block, w.s.head);
            if constexpr (kIsCode<T>) {
                const int64_t bytes = 4 * std::min<int64_t>(to - t, c.block_size - offset);
                std::memcpy(w.key_scales + t, (const char*)k + c.key_scales + 4 * offset, bytes);
                std::memcpy(w.value_scales + t, (const char*)v + c.value_scales + 4 * offset, bytes);
            }
            for (; t < to && offset < c.block_size; ++t, ++offset)
                w.keys[t] = k + offset * c.key_strides[2], w.values[t] = v + offset * c.value_strides[2];
        }
        for (int t = low; t < from; ++t) w.keys[t] = w.keys[from];  // `softmax` masks their scores
        for (int t = to; t < whole; ++t) w.keys[t] = w.keys[from];
        if constexpr (kIsCode<T>) {
            std::fill(w.key_scales + low, w.key_scales + from, 0.f), std::fill(w.key_scales + to, w.key_scales + whole, 0.f);
            std::fill(w.value_scales + low, w.value_scales + from, 0.f);
            std::fill(w.value_scales + to, w.value_scales + whole, 0.f);
        }
        score(w, low, whole);
        for (int64_t m = 0; m < w.M; ++m) softmax(w, m, at, low, from, to, whole, sums.top[m], sums.sum[m]);
        if (w.pairs_values) {
            add_pairs(w, from, to, sums.acc);
        } else if (c.value_dim == padded && (w.M <= kWidenings<T> * w.step || std::is_same<T, float>::value)) {
            add_values(w, w.values, from, to, sums.acc);
        } else {  // once for all rows of M
            const float* widened[kTile];
            for (int t = from; t < to; ++t) {
                float* wide = w.wide + t * padded;
                int64_t d = 0;
                for (; d + kLanes <= c.value_dim; d += kLanes) store_vf(wide + d, load_floats(w.values[t] + d));
                for (; d < padded; ++d) wide[d] = d < c.value_dim ? to_float(w.values[t] + d) : 0.f;
                widened[t] = wide;
            }
            add_values(w, widened, from, to, sums.acc);
        }
    }

    template <class T> void score(Work<T>& w, int low, int whole) const {
        if (w.tiled) {
            for (int t = low; t < whole; t += 16) {
                prefetch_keys(w, t, 16);
                tile_scores(w.M, (const BFloat16* const*)w.keys + t, (const uint32_t*)w.q, w.scores + t);
            }
        } else if (w.paired) {
            score_pairs(w, low, whole);
        } else if (w.dots) {
            for (int t = low; t < whole; t += kLanes) {
                prefetch_keys(w, t, kLanes);
                with_rows((int)w.M, [&](auto rows) {
                    if constexpr (rows() <= kDotRows) dot_rows<rows()>(w.q, (int)c.key_dim, w.keys + t, w.scores + t);
                });
            }
        } else {
            for (int t = low; t < whole; t += kSub) {
                prefetch_keys(w, t, kSub);
                transpose_keys(w.keys + t, (int)c.key_dim, w.kt);
                transpose_keys(w.keys + t + kLanes, (int)c.key_dim, w.kt + kLanes);
                for (int64_t m = 0; m < w.M; m += w.step)
                    with_rows((int)std::min(w.step, w.M - m), [&](auto rows) {
                        score_rows<rows()>(w.q + m * c.key_dim, (int)c.key_dim, w.kt, w.scores + m * kTile + t);
                    });
            }
        }
    }

    template <class T> void score_pairs([[maybe_unused]] Work<T>& w, int low, int whole) const {
#if HAS_PAIRS
        const int64_t words = c.key_dim / 2;
        uint32_t* kt = (uint32_t*)w.kt;
        for (int t = low; t < whole; t += kSub) {
            prefetch_keys(w, t, kSub);
            transpose_words((const void* const*)(w.keys + t), words, kt);
            transpose_words((const void* const*)(w.keys + t + kLanes), words, kt + kLanes);
            for (int64_t m = 0; m < w.M; m += w.step)
                with_rows((int)std::min(w.step, w.M - m), [&](auto rows) {
                    pair_rows<rows(), 2>((const uint32_t*)w.q + m * words, words, words, kt, kSub,
                                         w.scores + m * kTile + t, kTile, nullptr, (float)c.scale);
                });
        }
#else
        (void)low, (void)whole;
#endif
    }

    // acc = acc * alpha + weights @ values, in pairs of tokens, with the weights rounded to bfloat16.
    template <class T> void add_pairs([[maybe_unused]] Work<T>& w, int from, int to, float* acc) const {
#if HAS_PAIRS
        const int first = from / 2, last = (to + 1) / 2;
        uint32_t* pairs = (uint32_t*)w.wide;  // [tokens / 2][padded]
        for (int j = first; j < last; ++j) {
            prefetch_values(w, 2 * j, 2);
            const T* a = 2 * j >= from ? w.values[2 * j] : nullptr;
            const T* b = 2 * j + 1 < to ? w.values[2 * j + 1] : nullptr;
            interleave((const BFloat16*)a, (const BFloat16*)b, padded, pairs + j * padded);
        }
        for (int64_t m = 0; m < w.M; ++m) round_weights(w.scores + m * kTile);
        const uint32_t* weights = (const uint32_t*)w.scores;
        for (int64_t m = 0; m < w.M; m += w.step)
            with_rows((int)std::min(w.step, w.M - m), [&](auto rows) {
                constexpr int kWide = rows() <= 4 ? 4 : 2;  // as registers allow
                for (int64_t d = 0, wide; d < padded; d += wide * kLanes) {
                    const int64_t left = (padded - d) / kLanes;
                    wide = left >= kWide ? kWide : left >= 2 ? 2 : 1;
                    auto add = wide == kWide ? pair_rows<rows(), kWide> : pair_rows<rows(), 2>;
                    if (wide == 1) add = pair_rows<rows(), 1>;
                    add(weights + m * kTile + first, last - first, kTile, pairs + first * padded + d, padded,
                        acc + m * padded + d, padded, w.alpha + m, 1.f);
                }
            });
#else
        (void)from, (void)to, (void)acc;
#endif
    }

    template <class T, class V>
    void add_values(const Work<T>& w, const V* const* values, int from, int to, float* acc) const {
        for (int64_t m = 0; m < w.M; m += w.step)
            with_rows((int)std::min(w.step, w.M - m), [&](auto rows) {
                constexpr int kWide = LANES == 16 && rows() <= 4 ? 4 : 2;  // as registers allow
                for (int64_t d = 0, wide; d < padded; d += wide * kLanes) {
                    const int64_t left = (padded - d) / kLanes;
                    wide = left >= kWide ? kWide : left >= 2 ? 2 : 1;
                    auto add = wide == kWide ? value_rows<V, kWide, rows()> : value_rows<V, 2, rows()>;
                    if (wide == 1) add = value_rows<V, 1, rows()>;
                    if (!m) prefetch_values(w, d * kTile / padded, wide * kLanes * kTile / padded);
                    add(w.scores + m * kTile + from, to - from, values + from, (int)d, w.alpha + m,
                        acc + m * padded + d, (int)padded);
                }
            });
    }

    // Turns one row of scores [low, whole) of a tile into weights, in place, and updates its running maximum and sum.
    // Sets the row's alpha, which rescales the sums of earlier tiles.
    template <class T>
    void softmax(Work<T>& w, int64_t m, int64_t at, int low, int from, int to, int whole, float& top, float& sum) const {
        float *x = w.scores + m * kTile, &alpha = w.alpha[m];
        const Query& q = w.queries[w.s.first + m % w.s.count];
        const int64_t head = w.s.head * group + m / w.s.count;
        from = (int)std::clamp<int64_t>(q.low - at, from, to), to = (int)std::clamp<int64_t>(q.high - at, from, to);
        if constexpr (kIsCode<T>)
            for (int t = low; t < whole; t += kLanes) store_vf(x + t, load<vf>(x + t) * load<vf>(w.key_scales + t));
        if (c.softcap > 0)
            for (int t = low; t < whole; t += kLanes)
                store_vf(x + t, tanh16(load<vf>(x + t) * (float)(1 / c.softcap)) * (float)c.softcap);
        if (c.bias) {
            int64_t first = q.row * c.bias_strides[0] + head * c.bias_strides[1] + q.i * c.bias_strides[2];
            if (c.bias_dtype == 0 && c.bias_strides[3] == 1) {
                const float* bias = (const float*)c.bias + first + at;
                for (int t = from; t < to; ++t) x[t] += bias[t];
            } else {
                for (int t = from; t < to; ++t)
                    x[t] += float_at(c.bias, c.bias_dtype, first + (at + t) * c.bias_strides[3]);
            }
        }
        std::fill(x + low, x + from, -kInf);
        std::fill(x + to, x + whole, -kInf);
        vf lanes = splat(top);
        for (int t = low; t < whole; t += kLanes) lanes = larger(load<vf>(x + t), lanes);
        const float next = reduce(lanes, larger);
        alpha = 1.f;
        // If all scores so far are -inf, subtracting `next` would give NaN. A NaN score still makes its query's sums NaN.
        const float base = next == -kInf ? 0.f : next;
        if (next != top) alpha = exp1(top - base);
        vf total = {};
        for (int t = low; t < whole; t += kLanes) {
            vf p = exp16(load<vf>(x + t) - base);
            total += p;
            if constexpr (kIsCode<T>) p *= load<vf>(w.value_scales + t);
            store_vf(x + t, p);
        }
        sum = sum * alpha + reduce(total, plus);
        top = next;
    }

    template <class T> int execute() const {
        static thread_local Plan own;
        static thread_local Scratch storage;
        Plan& p = own;  // in worker threads, `own` is another plan
        p.clear();
        if (int error = plan(p)) return error;
        float* states = p.states ? storage.get(p.states) : nullptr;
        if (p.states && !states) return kNoMemory;
        std::atomic<bool> failed{false};
        const Query* queries = p.queries.data();
        for (const std::vector<Task>* tasks : {&p.shared, &p.tasks}) {
            const Task* all = tasks->data();
            const int64_t count = (int64_t)tasks->size();
            const bool is_alone = p.work * (c.key_dim + c.value_dim) <= kAlone;
            // the last queries, which `split` computes first, see the most keys
            split(count, is_alone ? 1 : c.threads, [&](int64_t i, int64_t) {
                if (!run<T>(all[i], queries, states)) failed.store(true, std::memory_order_relaxed);
            });
            if (failed) return kNoMemory;
        }
        const int64_t count = (int64_t)p.tasks.size();
        for (int64_t i = 0, j; i < count; i = j) {
            const Task& s = p.tasks[i];
            for (j = i + 1; j < count && p.tasks[j].first == s.first && p.tasks[j].head == s.head;) ++j;
            if (s.state < 0) continue;
            const int64_t M = group * s.count;
            const Sums sums = sums_at(states + s.state, M);
            for (int64_t k = i + 1; k < j; ++k) merge(M, sums, sums_at(states + p.tasks[k].state, M));
            write_out<T>(s, queries, sums);
        }
        return 0;
    }
};

}  // namespace

extern "C" int hf_paged_attention(const AttentionCall* call) {
    const AttentionCall& c = *call;  // attention.py has checked sizes and dtypes; a tensor may have lost its memory
    if (c.query_len < 0) return 4;
    if (!(c.batch && c.heads && c.num_tokens && c.value_dim)) return 0;
    if (!(c.query && c.out && c.seq_lens && c.starts)) return 4;
    if ((c.num_blocks && !(c.key && c.value)) || (c.max_blocks && !c.tables)) return 4;
    Kernel kernel{c};
    try {
        switch (c.stored) {
            case 0: break;
            case 1: return kernel.execute<Int8>();
            case 2: return kernel.execute<E4M3>();
            case 3: return kernel.execute<E5M2>();
            default: return 4;
        }
        if (c.dtype == 0) return kernel.execute<float>();
        return c.dtype == 1 ? kernel.execute<BFloat16>() : kernel.execute<Float16>();
    } catch (const std::bad_alloc&) {
        return kNoMemory;
    }
}
