// Included by kernels.cpp: helpers for AMX tiles (16 rows of 64 bytes), which attention and linear products use.

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__)
#define HAS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if HAS_AMX
struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, none[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

bool may_use_tiles() {  // Linux grants tiles to a process that requests them
    static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return granted;
}

inline void transpose16(__m512i (&r)[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2)
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]), r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]), r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88), t[i + 8] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 4] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88), r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);
    }
}

inline __m512 column16(const float* p) {  // a column of a matrix with rows of 16
    const __m512i place = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
    return _mm512_i32gather_ps(place, p, 4);
}
inline __m512 widen16(const void* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline __m256i narrow16(__m512 v) {  // to nearest even; unlike vcvtneps2bf16, keeps numbers below 2^-126
    const __m512i u = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(up, nan, _mm512_set1_epi32(0x7fc0)));
}
#endif

// Configures tiles 0 to 7 with 16 rows: 1, 4 and 5 of 64 bytes, the others of 4 * `columns`. The destructor restores the
// thread's earlier configuration.
struct Tiles {
#if HAS_AMX
    bool used;
    TileConfig before;
    Tiles(bool uses, int columns) : used(uses) {
        if (!used) return;
        TileConfig mine;
        _tile_storeconfig(&before);
        for (int i = 0; i < 8; ++i) mine.rows[i] = 16, mine.bytes[i] = i == 1 || i == 4 || i == 5 ? 64 : 4 * columns;
        _tile_loadconfig(&mine);
    }
    ~Tiles() {
        if (!used) return;
        if (before.palette) _tile_loadconfig(&before);
        else _tile_release();
    }
#else
    Tiles(bool, int) {}
#endif
};

}  // namespace
