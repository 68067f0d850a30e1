// torch.multinomial(probs, 1) on the CPU, bit for bit: each entry gets an exponential variate from torch's Mersenne
// Twister, and the entry with the largest ratio of probability to variate is drawn. The variate of a uniform u is
// -log(1 - u) >= u, so p / u bounds the ratio from above: the logarithm is computed only for entries whose bound reaches
// the best ratio so far.
namespace draw {

constexpr int kWords = 624, kShift = 397, kChunk = 64;

// The layout in which torch serialises its generator (CPUGeneratorImplStateLegacy), without the fields after these,
// which concern normal variates.
struct State {
    uint64_t seed;
    int32_t left, seeded;
    uint64_t next, words[kWords];
};

class Twister {
public:
    explicit Twister(const State& state) : position_(kWords - (state.left - 1)) {
        for (int i = 0; i < kWords; ++i) words_[i] = (uint32_t)state.words[i];
        temper();
    }

    void save(State& state) const {
        for (int i = 0; i < kWords; ++i) state.words[i] = words_[i];
        state.left = kWords + 1 - position_;
        state.next = position_;
    }

    void take(uint32_t* to, int count) {
        while (count > 0) {
            if (position_ == kWords) advance();
            const int n = std::min(count, kWords - position_);
            std::memcpy(to, ready_ + position_, n * sizeof(uint32_t));
            to += n, count -= n, position_ += n;
        }
    }

private:
    uint32_t words_[kWords], ready_[kWords];
    int position_;

    static uint32_t mix(uint32_t u, uint32_t v, uint32_t far) {
        const uint32_t joined = (u & 0x80000000u) | (v & 0x7fffffffu);
        return far ^ (joined >> 1) ^ ((v & 1u) ? 0x9908b0dfu : 0u);
    }

    void advance() {
        for (int i = 0; i < kWords - kShift; ++i) words_[i] = mix(words_[i], words_[i + 1], words_[i + kShift]);
        for (int i = kWords - kShift; i < kWords - 1; ++i)
            words_[i] = mix(words_[i], words_[i + 1], words_[i + kShift - kWords]);
        words_[kWords - 1] = mix(words_[kWords - 1], words_[0], words_[kShift - 1]);
        temper();
        position_ = 0;
    }

    void temper() {
        for (int i = 0; i < kWords; ++i) {
            uint32_t y = words_[i];
            y ^= y >> 11;
            y ^= (y << 7) & 0x9d2c5680u;
            y ^= (y << 15) & 0xefc60000u;
            ready_[i] = y ^ (y >> 18);
        }
    }
};

}  // namespace draw

// probs[rows][size], contiguous; drawn[rows].
struct DrawCall {
    const float* probs;
    int64_t rows, size;
    draw::State* state;
    int64_t* drawn;
};

// Returns 1, with nothing drawn, if torch.multinomial would reject the numbers of a row, or if the state is invalid.
extern "C" int hf_paged_draw(const DrawCall* call) {
    using namespace draw;
    const auto [probs, rows, size, at, drawn] = *call;
    State& state = *at;
    if (state.left < 1 || state.left > kWords + 1 || (rows && size && (!probs || !drawn))) return 1;
    for (int64_t row = 0; row < rows; ++row) {
        const float* p = probs + row * size;
        float largest = 0;
        int bad = 0;
        for (int64_t i = 0; i < size; ++i) {
            bad |= !(p[i] >= 0 && p[i] < std::numeric_limits<float>::infinity());
            largest = std::max(largest, p[i]);
        }
        if (bad || largest == 0) return 1;
    }
    Twister twister(state);
    uint32_t words[2 * kChunk];
    for (int64_t row = 0; row < rows; ++row) {
        const float* p = probs + row * size;
        float best = -1;
        for (int64_t start = 0; start < size; start += kChunk) {
            const int count = (int)std::min<int64_t>(kChunk, size - start);
            twister.take(words, 2 * count);
            int passes = 0;
            for (int i = 0; i < count; ++i) {
                const float u = (float)(words[2 * i] & 0x1fffffu) * 0x1p-21f + (float)words[2 * i + 1] * 0x1p-53f;
                passes |= p[start + i] * 1.00001f >= best * u;
            }
            for (int i = 0; passes && i < count; ++i) {
                const uint64_t bits = (uint64_t)(words[2 * i] & 0x1fffffu) << 32 | words[2 * i + 1];
                const double u = (double)bits * 0x1p-53;
                if (!(p[start + i] * 1.00001 >= best * u)) continue;
                const float ratio = p[start + i] / (float)-std::log1p(-u);
                if (ratio > best) drawn[row] = start + i, best = ratio;
            }
        }
    }
    twister.save(state);
    return 0;
}
