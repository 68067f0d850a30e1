// Included by kernels.cpp: a 128-bit hash of memory at the speed of reading it, for the fingerprint of the weights.
//
// Blocks of 4 KiB are hashed by NH (UMAC, Black et al., CRYPTO 1999, sec. 4), twice, with the keys of the second hash
// shifted by one pair: two different blocks agree in both with a probability of about 2^-64. Bijective mixes chain these
// hashes within chunks and then over chunks, so that the result depends on the order of the bytes but not on the number
// of threads. It detects accidental changes, but not those of an adversary.

struct HashCall {
    const char* const* starts;
    const int64_t* sizes;  // bytes
    uint64_t* out;         // two words
    int64_t count, threads;
};

namespace {

constexpr int64_t kPairs = 512, kRow = 32, kAhead = 4096, kHashBlock = 8 * kPairs, kHashChunk = 64 * kHashBlock;
typedef uint32_t word __attribute__((may_alias, aligned(1)));  // weights may start at any address

inline uint64_t scramble(uint64_t x) {  // the finaliser of SplitMix64: a bijection
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

struct HashKeys {
    uint32_t low[kPairs + 1], high[kPairs + 1];
    HashKeys() {
        for (int64_t i = 0; i <= kPairs; ++i) {
            const uint64_t key = scramble((uint64_t)(i + 1) * 0x9e3779b97f4a7c15u);
            low[i] = (uint32_t)key, high[i] = (uint32_t)(key >> 32);
        }
    }
};

struct Digest {
    uint64_t a = 0x243f6a8885a308d3u, b = 0x13198a2e03707344u;
    void absorb(uint64_t x, uint64_t y) {
        a = scramble(a ^ x) + b;
        b = scramble(b ^ y) + (a << 1 | a >> 63);
    }
};

// NH of one block. Each word is paired with the one kRow words later, so that whole vectors are read in memory order.
inline void absorb_block(const char* block, const HashKeys& keys, Digest& digest) {
    uint64_t first = 0, second = 0;
    for (int64_t row = 0; row < kPairs; row += kRow) {
        const word* words = (const word*)block + 2 * row;
        __builtin_prefetch((const char*)words + kAhead);
        __builtin_prefetch((const char*)words + kAhead + 64);
        for (int64_t i = 0; i < kRow; ++i) {
            const uint32_t x = words[i], y = words[kRow + i];
            first += (uint64_t)(x + keys.low[row + i]) * (uint32_t)(y + keys.high[row + i]);
            second += (uint64_t)(x + keys.low[row + i + 1]) * (uint32_t)(y + keys.high[row + i + 1]);
        }
    }
    digest.absorb(first, second);
}

Digest hash_chunk(const char* from, int64_t bytes, const HashKeys& keys) {
    Digest digest;
    for (; bytes >= kHashBlock; from += kHashBlock, bytes -= kHashBlock) absorb_block(from, keys, digest);
    if (bytes) {
        char rest[kHashBlock] = {};
        std::memcpy(rest, from, bytes);
        absorb_block(rest, keys, digest);
    }
    return digest;
}

}  // namespace

extern "C" int hf_paged_hash(const HashCall* call) {
    static const HashKeys keys;
    const HashCall& c = *call;
    for (int64_t i = 0; i < c.count; ++i)
        if (c.sizes[i] < 0 || (c.sizes[i] && !c.starts[i])) return 1;
    struct Chunk { const char* from; int64_t bytes; };
    std::vector<Chunk> chunks;
    for (int64_t i = 0; i < c.count; ++i)
        for (int64_t at = 0; at < c.sizes[i]; at += kHashChunk)
            chunks.push_back({c.starts[i] + at, std::min(kHashChunk, c.sizes[i] - at)});
    std::vector<Digest> digests(chunks.size());
    const int64_t count = (int64_t)chunks.size();
    split(count, count > 4 ? c.threads : 1, [&](int64_t i, int64_t) {
        digests[i] = hash_chunk(chunks[i].from, chunks[i].bytes, keys);
    });
    Digest all;
    const Digest* next = digests.data();
    for (int64_t i = 0; i < c.count; ++i) {
        all.absorb((uint64_t)c.sizes[i], (uint64_t)i);
        for (int64_t at = 0; at < c.sizes[i]; at += kHashChunk, ++next) all.absorb(next->a, next->b);
    }
    c.out[0] = scramble(all.a ^ all.b), c.out[1] = scramble(all.b + 1);
    return 0;
}
