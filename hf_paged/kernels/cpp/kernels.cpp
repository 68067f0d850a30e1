// The C++ kernels for the CPU: attention over blocks, matrix products of a few rows, lists of small operations, stores
// and gathers of K/V, draws and hashes.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "team.cpp"
#include "draw.cpp"
#include "hash.cpp"
#include "lanes.cpp"
#include "tiles.cpp"
#include "attention.cpp"
#include "linear.cpp"
#include "rows.cpp"

// Strides in bytes. slots[batch][tokens] is contiguous; tokens with a negative slot are not stored. `bytes`: of one
// token and head in a block. `stored` as in AttentionCall; unless it is 0, states of `dtypes` are stored as codes, and
// their scales begin `scales` bytes after the start of a head's block.
struct StoreCall {
    const char* source[2];
    const int64_t* slots;
    char* blocks[2];
    int64_t batch, kv_heads, tokens, block_size, num_slots;
    int64_t source_strides[2][3], block_strides[2][3], bytes[2];
    int64_t stored, dtypes[2], scales[2];
};

namespace {

// Quantizes one head of a token as kernels/quantized.py specifies; returns its scale.
template <class S, class T> float quantize(const S* from, int64_t dim, T* to) {
    vi most = (vi)splat(kTiny);  // magnitudes compare like their bits; NaN is above all others
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
        const vi x = (vi)load_floats(from + d) & 0x7fffffff;
        most = x > most ? x : most;
    }
    for (; d < dim; ++d) {
        const vi x = (vi)splat(to_float(from + d)) & 0x7fffffff;
        most = x > most ? x : most;
    }
    float top;
    const int32_t bits = *std::max_element((const int32_t*)&most, (const int32_t*)&most + kLanes);
    std::memcpy(&top, &bits, 4);
    const float scale = top * (float)(1.0 / kLargest<T>), inverse = 1.f / scale;
    for (d = 0; d + kLanes <= dim; d += kLanes) {
        float x[kLanes];
        store_vf(x, load_floats(from + d) * inverse);
        for (int i = 0; i < kLanes; ++i) put(to + d + i, x[i]);
    }
    for (; d < dim; ++d) put(to + d, to_float(from + d) * inverse);
    return scale;
}
template <class T> float quantize(const char* from, int64_t dtype, int64_t dim, char* to) {
    if (dtype == 0) return quantize((const float*)from, dim, (T*)to);
    return dtype == 1 ? quantize((const BFloat16*)from, dim, (T*)to) : quantize((const Float16*)from, dim, (T*)to);
}
using Quantize = float (*)(const char* from, int64_t dtype, int64_t dim, char* to);
// Returns null for unquantized blocks (0), and for unknown numbers.
Quantize quantizer(int64_t stored) {
    switch (stored) {
        case 1: return quantize<Int8>;
        case 2: return quantize<E4M3>;
        case 3: return quantize<E5M2>;
        default: return nullptr;
    }
}

}  // namespace

extern "C" int hf_paged_store(const StoreCall* call) {
    const StoreCall& c = *call;
    if (!(c.batch && c.kv_heads && c.tokens)) return 0;
    const Quantize quantize = quantizer(c.stored);
    if (!c.slots || (c.stored && !quantize)) return 4;
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
                for (int64_t h = 0; h < c.kv_heads; ++h, from += source[1], to += target[1]) {
                    if (!quantize) {
                        std::memcpy(to, from, c.bytes[which]);
                        continue;
                    }
                    const float scale = quantize(from, c.dtypes[which], c.bytes[which], to);
                    const int64_t offset = slot % c.block_size;
                    std::memcpy(to - offset * target[2] + c.scales[which] + offset * 4, &scale, 4);
                }
            }
    return 0;
}

// Strides in bytes. Column `first + i` of a row is its token `first + i - origins[row]`, or zeros if that is negative.
struct GatherCall {
    const char* blocks;
    char* out;  // [rows][heads][length], `bytes` each
    int64_t heads, num_blocks, strides[3], bytes;
    const int32_t *tables, *origins;
    const int32_t* lengths;  // tokens of each row: later columns become zeros; null: all columns have tokens
    int64_t rows, first, length, table_stride, max_blocks, block_size, threads;
};

extern "C" int hf_paged_gather(const GatherCall* call) {
    const GatherCall& c = *call;
    if (!(c.rows && c.heads && c.length && c.bytes)) return 0;
    if (!c.blocks || !c.out || !c.origins || (c.max_blocks && !c.tables)) return 4;
    for (int64_t row = 0; row < c.rows; ++row) {
        int64_t end = c.first + c.length - c.origins[row];
        if (c.lengths) end = std::min<int64_t>(end, c.lengths[row]);
        const int64_t used = end > 0 ? (end + c.block_size - 1) / c.block_size : 0;
        if (used > c.max_blocks) return 1;
        for (int64_t i = 0; i < used; ++i) {
            const int64_t block = c.tables[row * c.table_stride + i];
            if (block < 0 || block >= c.num_blocks) return 2;
        }
    }
    const bool is_shared = c.rows * c.heads * c.length * c.bytes > (1 << 18);
    split_range(c.rows * c.heads, is_shared ? c.threads : 1, [&](int64_t low, int64_t high, int64_t) {
        for (int64_t at = low; at < high; ++at) {
            const int64_t row = at / c.heads, head = at % c.heads;
            char* out = c.out + (row * c.heads + head) * c.length * c.bytes;
            const int64_t begin = c.first - c.origins[row], last = begin + c.length;
            const int64_t end = c.lengths ? std::min<int64_t>(last, c.lengths[row]) : last;
            const int64_t hidden = std::min(std::max<int64_t>(0, -begin), c.length);
            std::memset(out, 0, hidden * c.bytes);
            out += hidden * c.bytes;
            const int64_t stored = std::max<int64_t>(0, end - begin - hidden);
            std::memset(out + stored * c.bytes, 0, (c.length - hidden - stored) * c.bytes);
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
    });
    return 0;
}
