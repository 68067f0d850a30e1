// Included by kernels.cpp: vectors of as many float32 lanes as a register holds, written with the vector extensions of
// GCC and Clang. Wider vectors would also compile, but their shuffles and comparisons would run lane by lane.
#if defined(LANES)  // set by a test's build command: 4, 8 or 16
#elif defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

#if defined(__AVX512BF16__) && LANES == 16
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

namespace {

enum Path { kWide = 0, kDots = 1, kTiles = 2 };  // products of bfloat16: float32 lanes; AVX512-BF16; AMX
constexpr int kLanes = LANES, kTile = 64, kSub = 2 * kLanes;  // tokens in a tile; tokens transposed at once
constexpr int kMaxRows = LANES == 16 ? 8 : LANES == 8 ? 6 : 4;  // rows of M kept in registers
constexpr int kDotRows = LANES == 8 ? 4 : 3;  // rows of M up to which dot products beat a transpose of the keys
constexpr float kInf = std::numeric_limits<float>::infinity();

typedef float vf __attribute__((vector_size(4 * kLanes)));
typedef uint32_t vu __attribute__((vector_size(4 * kLanes)));
typedef int32_t vi __attribute__((vector_size(4 * kLanes)));
typedef uint16_t vh __attribute__((vector_size(2 * kLanes)));
typedef uint8_t vb __attribute__((vector_size(kLanes)));

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };
struct Int8 { uint8_t bits; };  // codes, as in kernels/quantized.py
struct E4M3 { uint8_t bits; };
struct E5M2 { uint8_t bits; };
template <class T> constexpr bool kIsCode = sizeof(T) == 1;
template <class T> constexpr double kLargest = 127;
template <> constexpr double kLargest<E4M3> = 448;
template <> constexpr double kLargest<E5M2> = 57344;
constexpr float kTiny = 0x1p-100f;

inline vf splat(float x) { return x - vf{}; }  // keeps -0
template <class V> inline V load(const void* p) { V v; std::memcpy(&v, p, sizeof v); return v; }
inline void store_vf(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
// a * b + c, rounded once if the CPU supports it. If the compiler decided where to fuse, it would do so for each template
// instance separately, and the bits of a row would depend on the other rows.
#if defined(__FMA__) && LANES == 16
inline vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif defined(__FMA__) && LANES == 8
inline vf fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#elif defined(__FMA__)
inline vf fma(vf a, vf b, vf c) { return (vf)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c); }
#else
inline vf fma(vf a, vf b, vf c) { return a * b + c; }
#endif
inline float fma(float a, float b, float c) {
#if defined(__FMA__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}
inline vf select(decltype(vf{} < vf{}) mask, vf a, vf b) { return mask ? a : b; }

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vu){__VA_ARGS__})
#endif

// swapN: lane i gets lane `i ^ N`. low_halves, high_halves: the lower and upper halves of two interleaved rows.
#if LANES == 16
inline vf swap8(vf x) { return SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7); }
inline vf swap4(vf x) { return SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11); }
inline vf swap2(vf x) { return SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13); }
inline vf swap1(vf x) { return SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14); }
inline vu low_halves(vu a, vu b) { return SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23); }
inline vu high_halves(vu a, vu b) {
    return SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
#elif LANES == 8
inline vf swap4(vf x) { return SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3); }
inline vf swap2(vf x) { return SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5); }
inline vf swap1(vf x) { return SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6); }
inline vu low_halves(vu a, vu b) { return SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
inline vu high_halves(vu a, vu b) { return SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
#else
inline vf swap2(vf x) { return SHUFFLE(x, x, 2, 3, 0, 1); }
inline vf swap1(vf x) { return SHUFFLE(x, x, 1, 0, 3, 2); }
inline vu low_halves(vu a, vu b) { return SHUFFLE(a, b, 0, 4, 1, 5); }
inline vu high_halves(vu a, vu b) { return SHUFFLE(a, b, 2, 6, 3, 7); }
#endif

template <class F> inline float reduce(vf x, F f) {
#if LANES == 16
    x = f(x, swap8(x));
#endif
#if LANES >= 8
    x = f(x, swap4(x));
#endif
    x = f(x, swap2(x));
    return f(x, swap1(x))[0];
}
inline vf larger(vf a, vf b) { return select(a > b, a, b); }
inline vf plus(vf a, vf b) { return a + b; }

// The sums of the lanes of four registers, with the bits of `reduce`.
inline void sum4(const vf* x, float* out) {
#if defined(__AVX__) && LANES == 8
    const __m256 a = (__m256)x[0], b = (__m256)x[1], c = (__m256)x[2], d = (__m256)x[3];
    const __m256 ab = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    const __m256 cd = _mm256_add_ps(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
    const __m256 pairs = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    const vf sums = (vf)_mm256_add_ps(_mm256_shuffle_ps(pairs, pairs, 0x88), _mm256_shuffle_ps(pairs, pairs, 0xdd));
    out[0] = sums[0], out[1] = sums[4], out[2] = sums[1], out[3] = sums[5];
#elif defined(__AVX512F__) && LANES == 16
    const auto halves = [](vf a, vf b) {  // lanes of 128 bits: the sums of a's halves, then of b's
        const __m512 low = _mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x44);
        return _mm512_add_ps(low, _mm512_shuffle_f32x4((__m512)a, (__m512)b, 0xee));
    };
    const __m512 ab = halves(x[0], x[1]), cd = halves(x[2], x[3]);
    __m512 sums = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, 0x4e));
    sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, 0xb1));
    const __m512i first_lanes = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(first_lanes, sums)));
#else
    for (int i = 0; i < 4; ++i) out[i] = reduce(x[i], plus);
#endif
}

// Widen 16 bits in each lane to float32. For Float16 a product rebiases the exponent, and inf and NaN are restored.
inline vf widen(BFloat16*, vu h) { return (vf)(h << 16); }
inline vf widen(Float16*, vu h) {
    vf f = (vf)((h & 0x7fffu) << 13) * 0x1p112f;
    vu special = (vu)((h & 0x7c00u) == 0x7c00u) & 0x7f800000u;
    return (vf)((vu)f | special | ((h & 0x8000u) << 16));
}
// Widen the codes at byte `at` of each lane. A product rebiases the exponent. Codes of inf and NaN become finite numbers,
// but the scale of their token is not finite.
inline vu moved(vu word, int left) { return left < 0 ? word >> -left : word << left; }
template <int kMantissa, int kBias> inline vf widen_code8(vu word, int at) {
    constexpr int kLow = 23 - kMantissa;
    constexpr float kFactor = kBias == 7 ? 0x1p120f : 0x1p112f;
    const vu sign = moved(word, 24 - 8 * at) & 0x80000000u;
    return (vf)((vu)((vf)(moved(word, kLow - 8 * at) & (0x7fu << kLow)) * kFactor) | sign);
}
inline vf widen(Int8*, vu word, int at = 0) {
    return __builtin_convertvector((vi)moved(word, 24 - 8 * at) >> 24, vf);
}
inline vf widen(E4M3*, vu word, int at = 0) { return widen_code8<3, 7>(word, at); }
inline vf widen(E5M2*, vu word, int at = 0) { return widen_code8<2, 15>(word, at); }
#if defined(__AVX512F__) && LANES == 16
inline vu load_bytes(const void* p) { return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
#elif defined(__AVX2__) && LANES == 8
inline vu load_bytes(const void* p) { return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
#else
inline vu load_bytes(const void* p) { return __builtin_convertvector(load<vb>(p), vu); }
#endif
#if defined(__AVX2__) && LANES == 8  // GCC would widen each half separately
inline vu load_words(const void* p) { return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)); }
#else
inline vu load_words(const void* p) { return __builtin_convertvector(load<vh>(p), vu); }
#endif
template <class T> inline vf load_floats(const T* p) {
    if constexpr (kIsCode<T>) return widen((T*)nullptr, load_bytes(p));
    else return widen((T*)nullptr, load_words(p));
}
inline vf load_floats(const float* p) { return load<vf>(p); }
#if defined(__AVX512F__) && LANES == 16
inline vf load_floats(const Int8* p) {
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
#elif defined(__AVX2__) && LANES == 8
inline vf load_floats(const Int8* p) {
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
#endif
template <class T> inline float to_float(const T* p) { return widen((T*)nullptr, vu{} + (uint32_t)p->bits)[0]; }
inline float to_float(const float* p) { return *p; }

inline void put(float* p, float x) { *p = x; }
inline void put(BFloat16* p, float x) {  // rounds to nearest even
    uint32_t u;
    std::memcpy(&u, &x, 4);
    p->bits = x != x ? 0x7fc0 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}
inline void put(Float16* p, float x) {
    uint32_t u, a;
    std::memcpy(&u, &x, 4);
    a = u & 0x7fffffff;
    uint16_t h;
    if (a > 0x7f800000) h = 0x7e00;
    else if (a >= 0x477ff000) h = 0x7c00;                                        // rounds to inf
    else if (a >= 0x38800000) h = (a + 0xfff + ((a >> 13) & 1) - 0x38000000) >> 13;  // normal
    else {  // subnormal: adding 0.5 lets the FPU round to a multiple of 2^-24
        float f;
        std::memcpy(&f, &a, 4);
        f += 0.5f;
        std::memcpy(&a, &f, 4);
        h = a - 0x3f000000;
    }
    p->bits = h | ((u >> 16) & 0x8000);
}

// Round a number in the range of the codes to a code. Int8 does not round by adding a constant: the compiler would fuse
// this sum with the product that computed `x`, which must be rounded first, as in kernels/quantized.py.
inline void put(Int8* p, float x) { p->bits = (uint8_t)(int32_t)__builtin_rintf(x); }
template <int kMantissa, int kBias> inline uint8_t code8(float x) {
    constexpr int kShift = 23 - kMantissa;
    uint32_t u, a, h;
    std::memcpy(&u, &x, 4);
    a = u & 0x7fffffff;
    if (a >= (uint32_t)(128 - kBias) << 23) {
        h = (a + (1u << (kShift - 1)) - 1 + ((a >> kShift) & 1) - ((uint32_t)(127 - kBias) << 23)) >> kShift;
    } else {  // subnormal, as above
        constexpr uint32_t kUnit = (uint32_t)(128 - kBias + kShift) << 23;
        float f, unit;
        std::memcpy(&f, &a, 4), std::memcpy(&unit, &kUnit, 4);
        f += unit;
        std::memcpy(&h, &f, 4);
        h -= kUnit;
    }
    return (uint8_t)((h & 0x7f) | ((u >> 24) & 0x80));
}
inline void put(E4M3* p, float x) { p->bits = code8<3, 7>(x); }
inline void put(E5M2* p, float x) { p->bits = code8<2, 15>(x); }

// Store kLanes numbers in the target's dtype, rounded like `put`.
inline void put_lanes(float* p, vf x) { store_vf(p, x); }
inline void put_lanes(BFloat16* p, vf x) {
    const vu u = (vu)x, up = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const vh h = __builtin_convertvector((vu)select(x == x, (vf)up, (vf)(vu{} + 0x7fc0u)), vh);
    std::memcpy((void*)p, &h, sizeof h);
}
inline void put_lanes(Float16* p, vf x) {
    for (int i = 0; i < kLanes; ++i) put(p + i, x[i]);
}

// exp for x <= 88, with a relative error of about 1e-7; 0 below -87, NaN for NaN. Adding 1.5 * 2^23 rounds to an integer
// whose low bits are the exponent of the result.
inline vf exp16(vf x) {
    const vf magic = splat(12582912.f);
    vf y = select(x < -87.f, splat(-87.f), x);
    vf z = y * 1.44269504f + magic, n = z - magic;
    vf r = y - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.f;
    return select(x < -87.f, vf{}, p * (vf)(((vu)z + 127) << 23));
}
inline float exp1(float x) { return exp16(splat(x))[0]; }
inline vf tanh16(vf x) {
    vf y = select(x > 20.f, splat(20.f), select(x < -20.f, splat(-20.f), x));
    return 1.f - 2.f / (exp16(y + y) + 1.f);
}

#if defined(__AVX__) && LANES == 8
// Crosses the halves of registers only in the last stage, since each crossing is slow.
inline void transpose(vu* r) {
    __m256 t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps((__m256)r[i], (__m256)r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps((__m256)r[i], (__m256)r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; ++j) {
            u[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
            u[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xee);
        }
    for (int i = 0; i < 4; ++i) {
        r[i] = (vu)_mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
        r[i + 4] = (vu)_mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
    }
}
#else
// Interleaving rows i and i + kLanes / 2 rotates the bits of (row, lane) by one; log2(kLanes) such stages transpose.
inline void transpose(vu* r) {
    for (int stage = 1; stage < kLanes; stage *= 2) {
        vu t[kLanes];
        for (int i = 0; i < kLanes / 2; ++i) {
            t[2 * i] = low_halves(r[i], r[i + kLanes / 2]);
            t[2 * i + 1] = high_halves(r[i], r[i + kLanes / 2]);
        }
        for (int i = 0; i < kLanes; ++i) r[i] = t[i];
    }
}
#endif

// Writes word w of kLanes tokens to rows of the transposed tile `kt[dim][kSub]`: one dim of float32, two of a 16-bit
// type, four of codes.
inline void put_word(float* kt, int w, vu word, const float*) { store_vf(kt + (int64_t)w * kSub, (vf)word); }
template <class T> inline void put_word(float* kt, int w, vu word, const T*) {
    if constexpr (kIsCode<T>) {
        for (int i = 0; i < 4; ++i) store_vf(kt + (4 * (int64_t)w + i) * kSub, widen((T*)nullptr, word, i));
    } else {
        store_vf(kt + 2 * (int64_t)w * kSub, widen((T*)nullptr, word & 0xffffu));
        store_vf(kt + (2 * (int64_t)w + 1) * kSub, widen((T*)nullptr, word >> 16));
    }
}
template <class T> void transpose_keys(const T* const* tokens, int dim, float* kt) {
    const int words = dim * (int)sizeof(T) / 4;
    if (words < kLanes || dim * sizeof(T) % 4) {
        for (int d = 0; d < dim; ++d)
            for (int t = 0; t < kLanes; ++t) kt[(int64_t)d * kSub + t] = to_float(tokens[t] + d);
        return;
    }
    for (int w = 0; w < words; w += kLanes) {
        w = std::min(w, words - kLanes);  // the last step may overlap the one before
        vu r[kLanes];
        for (int t = 0; t < kLanes; ++t) r[t] = load<vu>((const char*)tokens[t] + 4 * (int64_t)w);
        transpose(r);
        for (int i = 0; i < kLanes; ++i) put_word(kt, w + i, r[i], (const T*)nullptr);
    }
}

// scores[M][kLanes] = a[M][k] @ tokens[kLanes][k], with k a multiple of kLanes. The products of a token are summed
// across lanes for all tokens at once.
template <int M, class T> void dot_rows(const float* a, int k, const T* const* tokens, float* out) {
    vu s[M][kLanes];
    for (int t = 0; t < kLanes; ++t) {
        vf sum[M] = {};
        for (int d = 0; d < k; d += kLanes) {
            vf b = load_floats(tokens[t] + d);
            for (int m = 0; m < M; ++m) sum[m] = fma(load<vf>(a + (int64_t)m * k + d), b, sum[m]);
        }
        for (int m = 0; m < M; ++m) s[m][t] = (vu)sum[m];
    }
    for (int m = 0; m < M; ++m) {
        transpose(s[m]);
        for (int width = kLanes / 2; width; width /= 2)
            for (int i = 0; i < width; ++i) s[m][i] = (vu)((vf)s[m][i] + (vf)s[m][i + width]);
        store_vf(out + m * kTile, (vf)s[m][0]);
    }
}

// scores[M][kSub] = a[M][k] @ kt[k][kSub]
template <int M> void score_rows(const float* a, int k, const float* kt, float* out) {
    vf s[M][2] = {};
    for (int d = 0; d < k; ++d) {
        vf b0 = load<vf>(kt + (int64_t)d * kSub), b1 = load<vf>(kt + (int64_t)d * kSub + kLanes);
        for (int m = 0; m < M; ++m) {
            vf x = splat(a[(int64_t)m * k + d]);
            s[m][0] = fma(x, b0, s[m][0]);
            s[m][1] = fma(x, b1, s[m][1]);
        }
    }
    for (int m = 0; m < M; ++m)
        for (int v = 0; v < 2; ++v) store_vf(out + m * kTile + v * kLanes, s[m][v]);
}

// acc[M][N * kLanes] = acc * alpha[M] + weights[M][n] @ values[n][N * kLanes]
template <class T, int N, int M>
void value_rows(const float* weights, int n, const T* const* tokens, int column, const float* alpha, float* acc,
                int dim) {
    vf s[M][N];
    for (int m = 0; m < M; ++m)
        for (int v = 0; v < N; ++v) s[m][v] = load<vf>(acc + (int64_t)m * dim + v * kLanes) * alpha[m];
    for (int t = 0; t < n; ++t) {
        vf b[N];
        for (int v = 0; v < N; ++v) b[v] = load_floats(tokens[t] + column + v * kLanes);
        for (int m = 0; m < M; ++m) {
            vf x = splat(weights[m * kTile + t]);
            for (int v = 0; v < N; ++v) s[m][v] = fma(x, b[v], s[m][v]);
        }
    }
    for (int m = 0; m < M; ++m)
        for (int v = 0; v < N; ++v) store_vf(acc + (int64_t)m * dim + v * kLanes, s[m][v]);
}

#if HAS_PAIRS
// Writes words of kLanes tokens, each a pair of numbers, to rows of a transposed tile `kt[words][kSub]`; at least kLanes
// words.
inline void transpose_words(const void* const* tokens, int64_t words, uint32_t* kt) {
    for (int64_t w = 0; w < words; w += kLanes) {
        w = std::min(w, words - kLanes);  // the last step may overlap the one before
        vu r[kLanes];
        for (int t = 0; t < kLanes; ++t) r[t] = load<vu>((const char*)tokens[t] + 4 * w);
        transpose(r);
        for (int i = 0; i < kLanes; ++i) std::memcpy(kt + (w + i) * kSub, &r[i], sizeof r[i]);
    }
}

// Interleaves two tokens into pairs; a null token counts as zeros. `dim` is a multiple of kLanes.
inline void interleave(const BFloat16* a, const BFloat16* b, int64_t dim, uint32_t* out) {
    for (int64_t d = 0; d < dim; d += kLanes) {
        const vu low = a ? __builtin_convertvector(load<vh>(a + d), vu) : vu{};
        const vu high = b ? __builtin_convertvector(load<vh>(b + d), vu) : vu{};
        const vu pairs = low | (high << 16);
        std::memcpy(out + d, &pairs, sizeof pairs);
    }
}

// Rounds kTile weights to pairs of bfloat16, in place.
inline void round_weights(float* x) {
    for (int t = 0; t < kTile; t += 32) {
        const __m512bh pairs = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + t + 16), _mm512_loadu_ps(x + t));
        std::memcpy((void*)(x + t / 2), &pairs, sizeof pairs);
    }
}

// out[M][N * kLanes] = (out * alpha[M] + a[M][k] @ b[k][N * kLanes]) * scale, of pairs; without alpha, out counts as 0.
template <int M, int N>
void pair_rows(const uint32_t* a, int64_t k, int64_t a_stride, const uint32_t* b, int64_t b_stride, float* out,
               int64_t out_stride, const float* alpha, float scale) {
    __m512 s[M][N];
    for (int m = 0; m < M; ++m)
        for (int v = 0; v < N; ++v)
            s[m][v] = alpha ? _mm512_loadu_ps(out + m * out_stride + v * kLanes) * alpha[m] : _mm512_setzero_ps();
    for (int64_t i = 0; i < k; ++i) {
        __m512bh y[N];
        for (int v = 0; v < N; ++v) y[v] = (__m512bh)_mm512_loadu_si512(b + i * b_stride + v * kLanes);
        for (int m = 0; m < M; ++m) {
            const __m512bh x = (__m512bh)_mm512_set1_epi32((int)a[m * a_stride + i]);
            for (int v = 0; v < N; ++v) s[m][v] = _mm512_dpbf16_ps(s[m][v], x, y[v]);
        }
    }
    for (int m = 0; m < M; ++m)
        for (int v = 0; v < N; ++v) _mm512_storeu_ps(out + m * out_stride + v * kLanes, s[m][v] * scale);
}
#endif

// Calls f(std::integral_constant<int, m>) for a run-time m of 1..kMaxRows.
template <int M = 1, class F> inline void with_rows(int m, F f) {
    if (m == M) return f(std::integral_constant<int, M>{});
    if constexpr (M < kMaxRows) with_rows<M + 1>(m, f);
}

}  // namespace

