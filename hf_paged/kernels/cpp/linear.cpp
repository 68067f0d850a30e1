// Included by kernels.cpp: y = x W^T + b for a few rows of x. W is read in place, as nn.Linear ([width][depth]) or Conv1D
// ([depth][width]) stores it, or as 8-bit codes; all paths but kDots first convert or pack x. The order in which an
// output is summed over depth depends on the path, but not on other rows or on the number of threads.

constexpr int kMaxPieces = 4;

// Strides in elements; dtypes as in AttentionCall. `is_transposed`: W is [depth][width], and `weight_stride` is the
// stride of its first dimension, as for [width][depth]. `has_codes`: W [width][depth] holds Int8, not the dtype of x. If
// `group` is not 0, W is (code - zero) * scale, and every `group` codes of a row share a scale and, unless `zeros` is
// null, a zero. Scales and zeros are [width][depth / group], contiguous. `group` is `depth`, or a power of two of at
// least `kMinGroup`.
struct LinearPiece {
    const void *weight, *bias;
    void* out;
    int64_t width, weight_stride, out_stride;
    const void *zeros, *scales;
};
struct LinearCall {
    const void* x;
    int64_t dtype, rows, depth, x_stride, is_transposed, has_codes, group, scale_dtype, path, threads, count;
    LinearPiece pieces[kMaxPieces];
};

namespace {

// Path kDots: a unit of work is `kUnit` weight rows, multiplied with up to `kDotColumns` rows of x at a time, as registers
// allow. Up to `kPanel` units, which stay in the L2 cache, are multiplied with rows of x that stay in the L1 cache: as
// many as have `kNearBytes`, at most `kNearRows`.
constexpr int kUnit = 4;
constexpr int64_t kDotColumns = 6, kPanel = 8, kNearBytes = 20000, kNearRows = 24;
constexpr int64_t kPanelStride = (kPanel + 1) * kUnit;  // floats between rows of a panel's sums
constexpr int64_t kUnitsAhead = 3;                      // to the unit that is prefetched: enough to hide its latency
constexpr int64_t kPageElements = 2048;                 // bfloat16 in a page of memory
constexpr int64_t kMinGroup = 16;       // a group fills at least a register of lanes
constexpr int64_t kFewBytes = 1 << 16;  // bytes of weights below which one thread is faster than several

int64_t linear_units(const LinearCall& c, int64_t size) {
    int64_t n = 0;
    for (int i = 0; i < c.count; ++i) n += (c.pieces[i].width + size - 1) / size;
    return n;
}
struct LinearUnit { const LinearPiece* piece; int64_t first; };
LinearUnit linear_unit(const LinearCall& c, int64_t size, int64_t u) {
    const LinearPiece* p = c.pieces;
    for (int64_t n; u >= (n = (p->width + size - 1) / size); ++p) u -= n;
    return {p, u * size};
}

template <class T> void finish(const LinearPiece& p, int64_t m, int64_t n, float sum) {
    if (p.bias) sum += to_float((const T*)p.bias + n);
    put((T*)p.out + m * p.out_stride + n, sum);
}

// -- float32 lanes: x is widened first. For weights in bfloat16, its even and odd elements are separated, since a shift
// widens the even elements of a register of weights, and a mask the odd ones -----------------------------------------

template <class W> constexpr bool kInPairs = std::is_same<W, BFloat16>::value;
// Elements of a weight row that are loaded before the next prefetch.
template <class W> constexpr int kStep = kInPairs<W> ? 2 * kLanes : std::is_same<W, Int8>::value ? 4 * kLanes : kLanes;

// Floats between rows of the widened x: rows that begin at equal offsets within pages of memory would displace each
// other in the L1 cache.
inline int64_t wide_stride(const LinearCall& c) { return c.depth / 16 * 16 + 32; }

template <class T, class W> void widen_rows(const LinearCall& c, float* out) {
    const int64_t whole = kInPairs<W> && !c.is_transposed ? c.depth / (2 * kLanes) * (2 * kLanes) : 0;
    for (int64_t m = 0; m < c.rows; ++m, out += wide_stride(c)) {
        const T* x = (const T*)c.x + m * c.x_stride;
        for (int64_t k = 0; k < whole; k += 2 * kLanes)
            for (int i = 0; i < kLanes; ++i)
                out[k + i] = to_float(x + k + 2 * i), out[k + kLanes + i] = to_float(x + k + 2 * i + 1);
        for (int64_t k = whole; k < c.depth; ++k) out[k] = to_float(x + k);
    }
}

constexpr int kWideUnit = LANES == 16 ? 4 : 6;  // weight rows in a unit of work

// The zeros and scales of a unit's groups of codes, [kWideUnit][groups], widened. Element k of a row is in group
// `k >> shift`.
struct Groups {
    float *zeros, *scales;
    int64_t count, shift;
    Groups() = default;
    Groups(const LinearCall& c, float* memory) {
        count = c.depth / c.group, shift = 62;
        if (count > 1) for (shift = 0; int64_t{1} << shift < c.group;) ++shift;
        zeros = memory, scales = memory + kWideUnit * count;
    }
    void read(const LinearCall& c, const LinearPiece& p, int64_t first, int64_t rows) {
        for (int64_t i = 0; i < rows * count; ++i) {
            zeros[i] = p.zeros ? to_float((const Int8*)p.zeros + first * count + i) : 0.f;
            scales[i] = float_at(p.scales, c.scale_dtype, first * count + i);
        }
    }
    static int64_t floats(const LinearCall& c) { return c.group ? (2 * kWideUnit * (c.depth / c.group) + 15) / 16 * 16 : 0; }
    // Converts kLanes widened codes, which begin at element k of the unit's row `row`, to weights.
    vf scaled(vf codes, int64_t row, int64_t k) const {
        const int64_t group = row * count + (k >> shift);
        return (codes - splat(zeros[group])) * splat(scales[group]);
    }
};
// How many weight rows of a unit are multiplied with B rows of x at a time, as registers allow.
template <int B> constexpr int kWideRows = LANES == 16 ? 4 : B <= 2 ? 6 : 3;
constexpr int64_t kSlice = 1024;  // elements of depth for which a unit's weights and four rows of x stay in the L1 cache

// `x`, loaded into a register once: the compiler would load it again for each use.
inline vf kept(vf x) {
#if defined(__AVX512F__)
    __asm__("" : "+v"(x));
#elif defined(__AVX2__)
    __asm__("" : "+x"(x));
#endif
    return x;
}

// Adds the products of elements [low, high) of R weight rows and B rows of x to `sums` [B][kWideUnit]. If the weights are
// codes with scales, `groups` has their zeros and scales, from row `row` on; otherwise it is null.
template <bool prefetches, int R, int B, class W>
void wide_block(const W* w, int64_t stride, const float* x, int64_t x_stride, int64_t low, int64_t high,
                const char* ahead, const Groups* groups, int64_t row, vf* sums) {
    vf acc[R][B];
    for (int r = 0; r < R; ++r) for (int b = 0; b < B; ++b) acc[r][b] = sums[b * kWideUnit + r];
    const auto add = [&](int64_t k, const vf (&v)[R]) {
        for (int b = 0; b < B; ++b) {
            const vf xs = kept(load<vf>(x + b * x_stride + k));
            for (int r = 0; r < R; ++r) acc[r][b] = fma(v[r], xs, acc[r][b]);
        }
    };
    constexpr int step = kStep<W>;
    for (int64_t k = low; k < high; k += step) {
        if (prefetches)
            for (int r = 0; r < R; ++r) __builtin_prefetch(ahead + (k * R + r * step) * (int64_t)sizeof(W));
        if constexpr (kInPairs<W>) {
            vf even[R], odd[R];
            for (int r = 0; r < R; ++r) {
                const vu pair = load<vu>(w + r * stride + k);
                even[r] = (vf)(pair << 16), odd[r] = (vf)(pair & 0xffff0000u);
            }
            add(k, even);
            add(k + kLanes, odd);
        } else {
            for (int i = 0; i < step; i += kLanes) {
                vf v[R];
                for (int r = 0; r < R; ++r) v[r] = kept(load_floats(w + r * stride + k + i));
                if constexpr (std::is_same<W, Int8>::value)
                    if (groups)
                        for (int r = 0; r < R; ++r) v[r] = groups->scaled(v[r], row + r, k + i);
                add(k + i, v);
            }
        }
    }
    for (int r = 0; r < R; ++r) for (int b = 0; b < B; ++b) sums[b * kWideUnit + r] = acc[r][b];
}

template <class F> void with_count(int64_t n, F f) {
    if (n == 1) f(std::integral_constant<int, 1>());
    else if (n == 2) f(std::integral_constant<int, 2>());
    else if (n == 3) f(std::integral_constant<int, 3>());
    else if (n == 4) f(std::integral_constant<int, 4>());
    else if (n == 5) f(std::integral_constant<int, 5>());
    else f(std::integral_constant<int, 6>());
}

#if defined(__AVX512BF16__)
// Writes the sums of R weight rows and B rows of x to `sums` [B][kPanelStride]; `I`: 0 to R * B - 1. Prefetches P lines of
// memory for each 32 elements of depth, from `ahead` on. Only packs expand to code in which GCC keeps `acc` in registers.
template <int P, int R, int B, size_t... I>
__attribute__((noinline)) void dot_block(const BFloat16* w, int64_t stride, const BFloat16* x, int64_t x_stride,
                                         int64_t depth, const char* ahead, float* sums, std::index_sequence<I...>) {
    vf acc[kUnit * B] = {};
    const auto add = [&](const auto& load_row) __attribute__((always_inline)) {
        ((acc[I] = (vf)_mm512_dpbf16_ps((__m512)acc[I], (__m512bh)load_row(w + I / B * stride),
                                        (__m512bh)load_row(x + I % B * x_stride))), ...);
    };
    int64_t k = 0;
    for (; k + 32 <= depth; k += 32) {
        for (int i = 0; i < P; ++i) _mm_prefetch(ahead + (k * P + i * 32) * 2, _MM_HINT_T1);
        add([&](const BFloat16* row) { return _mm512_loadu_si512(row + k); });
    }
    if (k < depth) {  // masked loads are slower
        const __mmask32 mask = (1u << (depth - k)) - 1;
        add([&](const BFloat16* row) { return _mm512_maskz_loadu_epi16(mask, row + k); });
    }
    const auto write = [&](int64_t b, vf r0, vf r1, vf r2, vf r3) {
        const vf rows[] = {r0, r1, r2, r3};
        sum4(rows, sums + b * kPanelStride);
    };
    ((I < B ? write(I, acc[I % B], acc[B + I % B], acc[2 * B + I % B], acc[3 * B + I % B]) : void()), ...);
}

// Writes the sums of `count` weight rows, `kUnit` or the last ones of a piece, and `rows` rows of x to `sums`
// [rows][kPanelStride]. While it multiplies the first rows of x, it prefetches a later unit.
void multiply_unit(const LinearCall& c, const LinearPiece& p, int64_t first, int64_t count, int64_t from, int64_t rows,
                   float* sums) {
    using std::integral_constant;
    const int64_t blocks = (rows + kDotColumns - 1) / kDotColumns, stride = p.weight_stride;
    const int64_t lines = blocks == 1 ? kUnit : blocks < kUnit ? kUnit / 2 : 1;
    const BFloat16* w = (const BFloat16*)p.weight + first * stride;
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t m = rows * b / blocks;
        const BFloat16* x = (const BFloat16*)c.x + (from + m) * c.x_stride;
        with_count(rows * (b + 1) / blocks - m, [&](auto B) {
            const auto block = [&](auto P, auto R, int64_t r) {
                const char* ahead = (const char*)(w + kUnitsAhead * kUnit * stride + b * P() * c.depth);
                dot_block<P(), R(), B()>(w + r * stride, stride, x, c.x_stride, c.depth, ahead,
                                         sums + m * kPanelStride + r, std::make_index_sequence<R() * B()>());
            };
            const integral_constant<int, 0> none;
            const integral_constant<int, kUnit> all;
            if (count < kUnit) for (int64_t r = 0; r < count; ++r) block(none, integral_constant<int, 1>(), r);
            else if (from || b * lines >= kUnit) block(none, all, 0);
            else if (lines == 1) block(integral_constant<int, 1>(), all, 0);
            else if (lines == kUnit) block(all, all, 0);
            else block(integral_constant<int, kUnit / 2>(), all, 0);
        });
    }
}

// Writes `width` sums of row `m` of x, from output `first` on, to the output.
void finish_row(const LinearPiece& p, int64_t m, int64_t first, int64_t width, const float* sums) {
    int64_t n = 0;
    for (; n + kLanes <= width; n += kLanes) {
        vf sum = load<vf>(sums + n);
        if (p.bias) sum = sum + load_floats((const BFloat16*)p.bias + first + n);
        put_lanes((BFloat16*)p.out + m * p.out_stride + first + n, sum);
    }
    for (; n < width; ++n) finish<BFloat16>(p, m, first + n, sums[n]);
}
#endif

// Floats that a thread of `run_wide` needs for sums: vectors [rows][kWideUnit] of a unit, and their totals. Both numbers
// are rounded up to a multiple of four.
inline int64_t padded_outputs(const LinearCall& c) { return (c.rows * kWideUnit + 3) / 4 * 4; }
inline int64_t sum_floats(const LinearCall& c) { return (padded_outputs(c) * (kLanes + 1) + 15) / 16 * 16; }

// Floats of a slice of a unit's codes, widened once for all rows of x if there are more than four.
inline int64_t widened_floats(const LinearCall& c) { return c.has_codes && c.rows > 4 ? kWideUnit * kSlice : 0; }

// Computes units [low, high) of `kWideUnit` weight rows, for four rows of x at a time.
template <class T, class W> void run_wide(const LinearCall& c, const float* wide, float* scratch, int64_t low, int64_t high) {
    const int64_t outputs = padded_outputs(c);
    vf* sums = (vf*)scratch;
    float* totals = scratch + outputs * kLanes;
    [[maybe_unused]] float* widened = scratch + sum_floats(c);
    Groups groups = c.group ? Groups(c, widened + widened_floats(c)) : Groups();
    constexpr int64_t step = kStep<W>;
    const int64_t whole = c.depth / step * step, slice = c.rows > 4 ? kSlice : std::max<int64_t>(1, whole);
    const int64_t x_stride = wide_stride(c);
    for (int64_t u = low; u < high; ++u) {
        const LinearUnit unit = linear_unit(c, kWideUnit, u);
        const LinearPiece* p = unit.piece;
        const int64_t stride = p->weight_stride, first = unit.first;
        const int64_t count = std::min<int64_t>(kWideUnit, p->width - first);
        const W* w = (const W*)p->weight + first * stride;
        if (c.group) groups.read(c, *p, first, count);
        std::fill(sums, sums + outputs, vf{});
        for (int64_t from = 0; from < whole; from += slice) {
            const int64_t to = std::min(whole, from + slice);
            auto blocks = [&](auto prefetches, const auto* rows, int64_t stride, int64_t low, int64_t high, const float* x,
                              const Groups* groups, int64_t m) {
                with_count(std::min<int64_t>(4, c.rows - m), [&](auto B) {
                    auto block = [&](auto R, int64_t r) {
                        wide_block<prefetches(), R(), B()>(rows + r * stride, stride, x + m * x_stride, x_stride, low, high,
                                                           (const char*)(rows + (kWideUnit + r) * stride), groups, r,
                                                           sums + m * kWideUnit + r);
                    };
                    constexpr int size = kWideRows<B()>;
                    int64_t r = 0;
                    for (; r + size <= count; r += size) block(std::integral_constant<int, size>(), r);
                    for (; r < count; ++r) block(std::integral_constant<int, 1>(), r);
                });
            };
            if constexpr (std::is_same<W, Int8>::value)
                if (widened_floats(c)) {
                    for (int64_t r = 0; r < count; ++r)
                        for (int64_t k = from; k < to; k += kLanes) {
                            const vf codes = load_floats(w + r * stride + k);
                            store_vf(widened + r * kSlice + k - from, c.group ? groups.scaled(codes, r, k) : codes);
                        }
                    for (int64_t m = 0; m < c.rows; m += 4)
                        blocks(std::false_type(), widened, kSlice, 0, to - from, wide + from, nullptr, m);
                    continue;
                }
            const Groups* of_codes = c.group ? &groups : nullptr;
            blocks(std::true_type(), w, stride, from, to, wide, of_codes, 0);
            for (int64_t m = 4; m < c.rows; m += 4) blocks(std::false_type(), w, stride, from, to, wide, of_codes, m);
        }
        for (int64_t i = 0; i < outputs; i += 4) sum4(sums + i, totals + i);
        for (int64_t m = 0; m < c.rows; ++m)
            for (int64_t r = 0; r < count; ++r) {
                float sum = totals[m * kWideUnit + r];
                for (int64_t k = whole; k < c.depth; ++k) {
                    const float weight = to_float(w + r * stride + k);
                    const int64_t group = c.group ? r * groups.count + (k >> groups.shift) : 0;
                    const float scaled = c.group ? (weight - groups.zeros[group]) * groups.scales[group] : weight;
                    sum = fma(scaled, wide[m * x_stride + k], sum);
                }
                finish<T>(*p, m, first + r, sum);
            }
    }
}

#if defined(__AVX512BF16__)
// Computes units [low, high).
void run_dots(const LinearCall& c, int64_t low, int64_t high) {
    alignas(64) float sums[kNearRows * kPanelStride];
    const int64_t fitting = kNearBytes / 2 / std::max<int64_t>(1, c.depth);
    const int64_t groups = (c.rows - 1) / std::clamp(fitting, kDotColumns, kNearRows) + 1;
    for (int64_t u = low, units; u < high; u += units) {
        const LinearUnit panel = linear_unit(c, kUnit, u);
        const LinearPiece* p = panel.piece;
        units = std::min({kPanel, high - u, (p->width - panel.first + kUnit - 1) / kUnit});
        const int64_t width = std::min(p->width - panel.first, units * kUnit);
        for (int64_t g = 0; g < groups; ++g) {
            const int64_t from = c.rows * g / groups, rows = c.rows * (g + 1) / groups - from;
            for (int64_t n = 0; n < width; n += kUnit)
                multiply_unit(c, *p, panel.first + n, std::min<int64_t>(kUnit, width - n), from, rows, sums + n);
            for (int64_t m = 0; m < rows; ++m) finish_row(*p, from + m, panel.first, width, sums + m * kPanelStride);
        }
    }
}
#endif

// -- W [depth][width]: the sums of some columns stay in the cache while rows of W stream through -----------------------

constexpr int64_t kColumns = 512, kDeep = 8;

template <class T> void run_columns(const LinearCall& c, const float* wide, int64_t low, int64_t high) {
    alignas(64) float sums[4][kColumns];
    const int64_t x_stride = wide_stride(c);
    for (int64_t u = low; u < high; ++u) {
        const LinearUnit unit = linear_unit(c, kColumns, u);
        const LinearPiece* p = unit.piece;
        const int64_t first = unit.first;
        const int64_t count = std::min<int64_t>(kColumns, p->width - first), whole = count / kLanes * kLanes;
        for (int64_t m = 0; m < c.rows; m += 4) {
            const int64_t rows = std::min<int64_t>(4, c.rows - m);
            const float* x = wide + m * x_stride;
            std::memset(sums, 0, sizeof sums);
            for (int64_t k = 0; k < c.depth; k += kDeep) {
                const int64_t deep = std::min(kDeep, c.depth - k);
                const T* w = (const T*)p->weight + k * p->weight_stride + first;
                with_count(rows, [&](auto B) {
                    for (int64_t n = 0; n < whole; n += kLanes) {
                        vf acc[B()];
                        for (int b = 0; b < B(); ++b) acc[b] = load<vf>(sums[b] + n);
                        for (int64_t i = 0; i < deep; ++i) {
                            const vf v = load_floats(w + i * p->weight_stride + n);
                            for (int b = 0; b < B(); ++b) acc[b] = fma(v, splat(x[b * x_stride + k + i]), acc[b]);
                        }
                        for (int b = 0; b < B(); ++b) store_vf(sums[b] + n, acc[b]);
                    }
                });
                for (int64_t n = whole; n < count; ++n)
                    for (int64_t i = 0; i < deep; ++i)
                        for (int64_t b = 0; b < rows; ++b)
                            sums[b][n] = fma(to_float(w + i * p->weight_stride + n), x[b * x_stride + k + i], sums[b][n]);
            }
            for (int64_t b = 0; b < rows; ++b)
                for (int64_t n = 0; n < count; ++n) finish<T>(*p, m + b, first + n, sums[b][n]);
        }
    }
}

// -- AMX: the left tile is 16 weight rows of 32 elements, as laid out in memory; the right tile is x, its elements in
// pairs; so the product is transposed --------------------------------------------------------------------------------

#if HAS_AMX
// Packs tiles [low, high) along depth, of 16 rows of x each: [rows / 16][depth / 32][16 pairs][16 rows][2], padded with
// zeros.
void pair_rows(const LinearCall& c, uint32_t* out, int64_t low, int64_t high) {
    const int64_t tiles = (c.depth + 31) / 32;
    for (int64_t m = 0; m < c.rows; m += 16) {
        const int64_t rows = std::min<int64_t>(16, c.rows - m);
        for (int64_t t = low; t < high; ++t) {
            const BFloat16* from = (const BFloat16*)c.x + m * c.x_stride + t * 32;
            uint32_t* to = out + (m / 16 * tiles + t) * 256;
            const int64_t deep = std::min<int64_t>(32, c.depth - t * 32);
            const __mmask32 mask = deep == 32 ? ~0u : (1u << deep) - 1;
            if (rows <= 2) {
                alignas(64) uint32_t row[16];
                for (int64_t r = 0; r < rows; ++r) {
                    _mm512_store_si512(row, _mm512_maskz_loadu_epi16(mask, from + r * c.x_stride));
                    for (int i = 0; i < 16; ++i) to[i * 16 + r] = row[i];
                }
                continue;
            }
            __m512i v[16];
            for (int r = 0; r < 16; ++r)
                v[r] = r < rows ? _mm512_maskz_loadu_epi16(mask, from + r * c.x_stride) : _mm512_setzero_si512();
            transpose16(v);
            for (int i = 0; i < 16; ++i) _mm512_store_si512(to + i * 16, v[i]);
        }
    }
}

// The weights to prefetch, in memory order: one or two (`parts`) spans of equal length.
struct Ahead {
    const char *at[2] = {}, *end = nullptr;
    inline __attribute__((always_inline)) void fetch(int parts) {
        if (at[0] >= end) return;
        for (int a = 0; a < parts; at[a++] += 1024)
            for (int i = 0; i < 1024; i += 64) _mm_prefetch(at[a] + i, _MM_HINT_T1);
    }
};

// Sums of A x 16 weight rows and B x 16 rows of x in tiles 0 to 3, [A][B]; tiles 4 and 5 are weights, 6 and 7 are x.
template <int A, int B>
inline void tile_block(const BFloat16* w0, const BFloat16* w1, int64_t stride, const uint32_t* x0, const uint32_t* x1,
                       int64_t depth, Ahead& ahead, float* sums) {
    _tile_zero(0);
    if (B > 1) _tile_zero(1);
    if (A > 1) _tile_zero(2);
    if (A > 1 && B > 1) _tile_zero(3);
    for (int64_t k = 0; k < depth; k += 32, x0 += 256, x1 += 256) {
        const BFloat16 *a0 = w0 + k, *a1 = w1 + k;
        int64_t bytes = stride * 2;
        alignas(64) BFloat16 tail[2][512];
        if (k + 32 > depth) {  // bytes past the row may be NaN or unmapped
            std::memset((void*)tail, 0, sizeof tail);
            for (int r = 0; r < 16; ++r) {
                std::memcpy((void*)(tail[0] + r * 32), a0 + r * stride, (depth - k) * 2);
                if (A > 1) std::memcpy((void*)(tail[1] + r * 32), a1 + r * stride, (depth - k) * 2);
            }
            a0 = tail[0], a1 = tail[1], bytes = 64;
        }
        _tile_loadd(6, x0, 64);
        _tile_loadd(4, a0, bytes);
        _tile_dpbf16ps(0, 4, 6);
        if (A > 1) _tile_loadd(5, a1, bytes);
        if (A > 1) _tile_dpbf16ps(2, 5, 6);
        if (B > 1) _tile_loadd(7, x1, 64);
        if (B > 1) _tile_dpbf16ps(1, 4, 7);
        if (A > 1 && B > 1) _tile_dpbf16ps(3, 5, 7);
        ahead.fetch(A);
    }
    _tile_stored(0, sums, 64);
    if (B > 1) _tile_stored(1, sums + 256, 64);
    if (A > 1) _tile_stored(2, sums + 512, 64);
    if (A > 1 && B > 1) _tile_stored(3, sums + 768, 64);
}

// Writes sums [16 outputs][16 rows of x], transposed, to the output.
inline void finish16(const LinearPiece& p, int64_t m, int64_t rows, int64_t first, const float* sums) {
    __m512i t[16];
    if (rows > 2) {
        for (int i = 0; i < 16; ++i) t[i] = _mm512_load_si512(sums + i * 16);
        transpose16(t);
    }
    for (int64_t r = 0; r < rows; ++r) {
        __m512 v = rows > 2 ? _mm512_castsi512_ps(t[r]) : column16(sums + r);
        if (p.bias) v = _mm512_add_ps(v, widen16((const BFloat16*)p.bias + first));
        _mm256_storeu_si256((__m256i*)((BFloat16*)p.out + (m + r) * p.out_stride + first), narrow16(v));
    }
}

// Computes units [low, high) of `size` weight rows, 16 or 32. Some of the last 16 outputs of a piece may be computed
// twice, with equal bits.
void run_tiles(const LinearCall& c, const uint32_t* x, int64_t low, int64_t high, int64_t size) {
    const Tiles setting(true, (int)std::min<int64_t>(16, c.rows));
    alignas(64) float sums[1024];
    const int64_t tiles = (c.depth + 31) / 32 * 256, blocks = (c.rows + 15) / 16;
    for (int64_t u = low; u < high; ++u) {
        const LinearUnit unit = linear_unit(c, size, u);
        const LinearPiece* p = unit.piece;
        const int64_t first = unit.first;
        const int64_t n0 = std::min(first, p->width - 16), n1 = std::min(first + 16, p->width - 16);
        const bool two = size == 32 && first + 16 < p->width;
        const BFloat16 *w0 = (const BFloat16*)p->weight + n0 * p->weight_stride;
        const BFloat16 *w1 = (const BFloat16*)p->weight + n1 * p->weight_stride;
        Ahead ahead;
        if (u + 1 < high) {
            const LinearUnit next = linear_unit(c, size, u + 1);
            const int64_t stride = next.piece->weight_stride;
            ahead.at[0] = (const char*)((const BFloat16*)next.piece->weight + next.first * stride);
            ahead.at[1] = ahead.at[0] + 32 * stride;
            ahead.end = ahead.at[0] + 32 * c.depth;
        }
        for (int64_t b = 0; b < blocks; b += 2) {
            const uint32_t *x0 = x + b * tiles, *x1 = x0 + tiles;
            const bool pair = b + 1 < blocks;
            if (two && pair) tile_block<2, 2>(w0, w1, p->weight_stride, x0, x1, c.depth, ahead, sums);
            else if (two) tile_block<2, 1>(w0, w1, p->weight_stride, x0, x1, c.depth, ahead, sums);
            else if (pair) tile_block<1, 2>(w0, w1, p->weight_stride, x0, x1, c.depth, ahead, sums);
            else tile_block<1, 1>(w0, w1, p->weight_stride, x0, x1, c.depth, ahead, sums);
            for (int i = 0; i < (pair ? 2 : 1); ++i) {
                const int64_t m = (b + i) * 16, rows = std::min<int64_t>(16, c.rows - m);
                finish16(*p, m, rows, n0, sums + i * 256);
                if (two) finish16(*p, m, rows, n1, sums + 512 + i * 256);
            }
        }
    }
}
#endif

// Returns the path of a call, at most the requested one.
int linear_path(const LinearCall& c) {
    int64_t path = c.dtype == 1 && !c.is_transposed && !c.has_codes ? c.path : kWide;
    for (int i = 0; i < c.count; ++i)
        if (c.pieces[i].width < 16) path = std::min<int64_t>(path, kDots);
#if !HAS_AMX
    path = std::min<int64_t>(path, kDots);
#else
    if (path == kTiles && !may_use_tiles()) path = kDots;
#endif
#if !defined(__AVX512BF16__)
    path = kWide;
#endif
    return (int)path;
}

constexpr int64_t kBlockRows = 256;  // rows of x that are widened at a time

template <class T, class W> int run_lanes(const LinearCall& c, int64_t threads, Scratch& scratch) {
    const int64_t sums = c.is_transposed ? 0 : sum_floats(c) + widened_floats(c) + Groups::floats(c);
    const int64_t floats = c.rows * wide_stride(c);
    float* wide = scratch.get(floats + sums * threads);
    if (!wide) return kNoMemory;
    widen_rows<T, W>(c, wide);
    const int64_t units = linear_units(c, c.is_transposed ? kColumns : kWideUnit);
    split_range(units, threads, [&](int64_t low, int64_t high, int64_t thread) {
        if (c.is_transposed) run_columns<T>(c, wide, low, high);
        else run_wide<T, W>(c, wide, wide + floats + sums * thread, low, high);
    });
    return 0;
}

template <class T, class W = T> int run_linear(const LinearCall& c, int64_t threads) {
    static thread_local Scratch scratch;
    [[maybe_unused]] const int path = linear_path(c);
#if HAS_AMX
    if (path == kTiles) {
        const int64_t tiles = (c.depth + 31) / 32;
        uint32_t* x = (uint32_t*)scratch.get((c.rows + 31) / 16 * tiles * 256);
        if (!x) return kNoMemory;
        const int64_t size = linear_units(c, 32) < 4 * threads ? 16 : 32, units = linear_units(c, size);
        const int64_t packers = c.rows * c.depth < (1 << 13) ? 1 : threads;
        split_range(tiles, packers, [&](int64_t low, int64_t high, int64_t) { pair_rows(c, x, low, high); });
        split_range(units, threads, [&](int64_t low, int64_t high, int64_t) { run_tiles(c, x, low, high, size); });
        return 0;
    }
#endif
#if defined(__AVX512BF16__)
    if (path == kDots) {
        LinearCall call = c;
        if (c.rows > 4 && c.x_stride > 0 && c.x_stride % kPageElements == 0) {
            // rows that begin at equal offsets within pages of memory would displace each other in the L1 cache
            call.x_stride = c.depth + 32;
            BFloat16* copy = (BFloat16*)scratch.get((c.rows * call.x_stride + 1) / 2);
            if (!copy) return kNoMemory;
            call.x = copy;
            split_range(c.rows, threads, [&](int64_t low, int64_t high, int64_t) {
                for (int64_t m = low; m < high; ++m)
                    std::memcpy((void*)(copy + m * call.x_stride), (const BFloat16*)c.x + m * c.x_stride, c.depth * 2);
            });
        }
        const int64_t units = linear_units(c, kUnit);
        split_range(units, threads, [&](int64_t low, int64_t high, int64_t) { run_dots(call, low, high); });
        return 0;
    }
#endif
    for (int64_t m = 0; m < c.rows; m += kBlockRows) {
        LinearCall block = c;
        block.rows = std::min(kBlockRows, c.rows - m);
        block.x = (const T*)c.x + m * c.x_stride;
        for (int i = 0; i < c.count; ++i) block.pieces[i].out = (T*)c.pieces[i].out + m * c.pieces[i].out_stride;
        if (const int error = run_lanes<T, W>(block, threads, scratch)) return error;
    }
    return 0;
}

}  // namespace

// Returns the best path of this build on this CPU.
extern "C" int hf_paged_linear_path(const void*) {
#if HAS_AMX
    if (may_use_tiles()) return kTiles;
#endif
#if defined(__AVX512BF16__)
    return kDots;
#else
    return kWide;
#endif
}

// Whether this build has vector registers of at least 8 lanes, and threads.
extern "C" int hf_paged_is_optimized(const void*) {
#if defined(_OPENMP)
    return LANES >= 8;
#else
    return 0;
#endif
}

extern "C" int hf_paged_linear(const LinearCall* call) {
    const LinearCall& c = *call;
    if (c.rows < 0 || c.depth < 0 || c.count < 0 || c.count > kMaxPieces) return 4;
    if (c.is_transposed && c.has_codes) return 4;
    const bool is_whole = c.group == c.depth, is_even = c.group >= kMinGroup && !(c.group & (c.group - 1));
    if (c.group && !(c.has_codes && (is_whole || (is_even && c.depth % c.group == 0)))) return 4;
    int64_t elements = 0;
    for (int i = 0; i < c.count; ++i) {
        const LinearPiece& p = c.pieces[i];
        if (p.width < 0 || (c.rows && p.width && (!p.out || (c.depth && !(p.weight && c.x))))) return 4;
        if (c.group && p.width && !p.scales) return 4;
        elements += p.width * c.depth;
    }
    if (!c.rows || !c.count) return 0;
    // In float32 lanes, more than eight rows take longer to multiply than the weights take to read.
    const int64_t reads = linear_path(c) == kWide ? std::max<int64_t>(1, c.rows / 8) : 1;
    const int64_t threads = elements * 2 * reads < kFewBytes ? 1 : std::max<int64_t>(1, c.threads);
    if (c.dtype == 0) return c.has_codes ? run_linear<float, Int8>(c, threads) : run_linear<float>(c, threads);
    if (c.dtype == 1) return c.has_codes ? run_linear<BFloat16, Int8>(c, threads) : run_linear<BFloat16>(c, threads);
    return c.has_codes ? run_linear<Float16, Int8>(c, threads) : run_linear<Float16>(c, threads);
}
