// Included by kernels.cpp: lists of small operations on rows of numbers (norms, rotary embeddings, activations, sums).
// The whole list runs on a few rows at a time, in float32 buffers ("registers") small enough for the L1 or L2 cache. Each
// operation rounds its results to its dtype, as PyTorch's operations on that dtype do.

enum class RowOp : int32_t {
    Load, Store,
    Add, Sub, Mul, Div, Maximum, Minimum,             // of two registers, or of one and a number
    Neg, Abs, Sqrt, Rsqrt, Reciprocal, Square, Relu,  // of one register; not approximated
    Exp, Tanh, Sigmoid, Silu, Gelu, GeluTanh, Sin, Cos, Log, Softplus,
    Sum, Mean, Largest,  // over the whole row, to a narrow register
    Copy,
    Count
};

// Strides in elements: `strides` of the three leading dimensions, and `step` along a row. dtypes as in AttentionCall; 3
// is int64.
struct RowMemory { char* data; int64_t dtype, strides[3], step; };
// `out`, `a` and `b` are indices of registers; if `b` is -1, `number` replaces it. In Load and Store, `b` is the index
// of a memory.
struct RowInstruction { int32_t op, out, a, b, dtype, pad; double number; };
struct RowsCall {
    int64_t sizes[3], width, threads, num_memories, num_instructions, num_registers;
    const RowMemory* memories;
    const RowInstruction* instructions;
    const int32_t* narrow;  // for each register: whether it has one number per row
};

namespace {

constexpr int64_t kBlockFloats = 2048;  // floats per register; sets the rows per block
constexpr int64_t kFewNumbers = 1 << 15;  // scalar operations below which one thread is faster than several

inline vf rounded(vf x, int64_t dtype) {
    if (dtype == 1) {
        const vu u = (vu)x, up = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
        return select(x == x, (vf)up, (vf)(vu{} + 0x7fc00000u));
    }
    if (dtype == 2) {
        for (int i = 0; i < kLanes; ++i) {
            Float16 h;
            put(&h, x[i]);
            x[i] = to_float(&h);
        }
    }
    return x;
}

template <class F> inline vf each(vf x, F f) {
    for (int i = 0; i < kLanes; ++i) x[i] = f(x[i]);
    return x;
}
inline vf exp_any(vf x) {  // exp16 is defined up to 88, and 0 below -87, where float32 still has denormal numbers
    const auto far = (x > 87.f) | (x < -87.f);
    const vf y = exp16(select(far, select(x > 170.f, splat(85.f), x * 0.5f), x));
    return select(far, select(x > 170.f, splat(kInf), y * y), y);
}
inline vf tanh_any(vf x) {  // tanh16, but a polynomial of Cephes near 0, where tanh16 suffers from cancellation
    const vf z = x * x;
    vf p = z * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    return select(z < 0.390625f, p * z * x + x, tanh16(x));
}
inline vf erf16(vf x) {  // Abramowitz and Stegun, 7.1.26: absolute error below 2e-7
    const vf z = (vf)((vu)x & 0x7fffffffu), t = 1.f / (1.f + 0.3275911f * z);
    vf p = t * 1.061405429f - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const vf y = 1.f - p * t * exp16(-z * z);
    return (vf)((vu)y | ((vu)x & 0x80000000u));
}

// NaN propagates, as in PyTorch.
inline vf maximum(vf x, vf y) { return select(x != x, x, select(x > y, x, y)); }
inline vf minimum(vf x, vf y) { return select(x != x, x, select(x < y, x, y)); }
inline vf largest(vf x, vf y) { return select(x != x, x, select(y > x, y, select(y != y, y, x))); }
inline vf roots(vf x) {
    return each(x, [](float v) { return std::sqrt(v); });
}

struct Rows {
    const RowsCall& c;
    int64_t num_rows, stride, block;  // stride: floats of a row in a register

    explicit Rows(const RowsCall& call) : c(call) {
        num_rows = c.sizes[0] * c.sizes[1] * c.sizes[2];
        stride = (c.width + kLanes - 1) / kLanes * kLanes;
        block = std::clamp<int64_t>(kBlockFloats / stride, 1, num_rows);
        block = std::max<int64_t>(1, std::min(block, (num_rows + c.threads - 1) / c.threads));
    }
    int64_t register_floats() const { return (block * stride + kLanes) / kLanes * kLanes; }

    int64_t at(const RowMemory& m, int64_t row) const {
        const int64_t last = row % c.sizes[2], rest = row / c.sizes[2];
        return last * m.strides[2] + rest % c.sizes[1] * m.strides[1] + rest / c.sizes[1] * m.strides[0];
    }

    template <class T> void load(const RowMemory& m, bool narrow, int64_t first, int64_t rows, float* out) const {
        for (int64_t r = 0; r < rows; ++r) {
            const T* from = (const T*)m.data + at(m, first + r);
            if (narrow) {
                out[r] = float_of(from);
                continue;
            }
            float* to = out + r * stride;
            int64_t i = 0;
            if (m.step == 1) i = load_lanes(from, to);
            for (; i < c.width; ++i) to[i] = float_of(from + i * m.step);
            for (; i < stride; ++i) to[i] = 0.f;
        }
    }
    template <class T> int64_t load_lanes(const T* from, float* to) const {
        int64_t i = 0;
        if constexpr (!std::is_same<T, int64_t>::value)
            for (; i + kLanes <= c.width; i += kLanes) store_vf(to + i, load_floats(from + i));
        return i;
    }
    template <class T> static float float_of(const T* p) {
        if constexpr (std::is_same<T, int64_t>::value) return (float)*p;
        else return to_float(p);
    }

    // The register must hold numbers rounded to the memory's dtype.
    void store(const RowMemory& m, bool narrow, int64_t first, int64_t rows, const float* from) const {
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t offset = at(m, first + r), count = narrow ? 1 : c.width;
            const float* x = from + r * (narrow ? 1 : stride);
            if (m.dtype == 0) {
                float* to = (float*)m.data + offset;
                if (m.step == 1) std::memcpy(to, x, count * 4);
                else for (int64_t i = 0; i < count; ++i) to[i * m.step] = x[i];
            } else if (m.dtype == 1) {
                BFloat16* to = (BFloat16*)m.data + offset;
                int64_t i = 0;
                if (m.step == 1 && !narrow)
                    for (; i + kLanes <= count; i += kLanes) put_lanes(to + i, ::load<vf>(x + i));
                for (; i < count; ++i) put(to + i * m.step, x[i]);
            } else {
                Float16* to = (Float16*)m.data + offset;
                for (int64_t i = 0; i < count; ++i) put(to + i * m.step, x[i]);
            }
        }
    }

    template <class F> void binary(const RowInstruction& n, int64_t rows, float* out, const float* a, const float* b,
                                   F f) const {
        const bool thin = c.narrow[n.out], thin_a = c.narrow[n.a], thin_b = n.b >= 0 && c.narrow[n.b];
        const int64_t dtype = n.dtype;
        if (n.b < 0) {
            const vf number = splat((float)n.number);
            for (int64_t i = 0, count = thin ? rows : rows * stride; i < count; i += kLanes)
                store_vf(out + i, rounded(f(::load<vf>(a + i), number), dtype));
        } else if (thin_a == thin && thin_b == thin) {
            for (int64_t i = 0, count = thin ? rows : rows * stride; i < count; i += kLanes)
                store_vf(out + i, rounded(f(::load<vf>(a + i), ::load<vf>(b + i)), dtype));
        } else {
            for (int64_t r = 0; r < rows; ++r) {
                const vf one = splat(thin_a ? a[r] : b[r]);
                for (int64_t i = r * stride; i < (r + 1) * stride; i += kLanes) {
                    const vf left = thin_a ? one : ::load<vf>(a + i), right = thin_b ? one : ::load<vf>(b + i);
                    store_vf(out + i, rounded(f(left, right), dtype));
                }
            }
        }
    }
    template <class F> void unary(const RowInstruction& n, int64_t rows, float* out, const float* a, F f) const {
        for (int64_t i = 0, count = c.narrow[n.out] ? rows : rows * stride; i < count; i += kLanes)
            store_vf(out + i, rounded(f(::load<vf>(a + i)), n.dtype));
    }
    // Applies `f` to numbers one by one.
    template <class F> void scalars(const RowInstruction& n, int64_t rows, float* out, const float* a, F f) const {
        unary(n, rows, out, a, [&](vf x) { return each(x, f); });
    }
    template <class F> void reduction(const RowInstruction& n, int64_t rows, float* out, const float* a, float start,
                                      F f, float scale) const {
        for (int64_t r = 0; r < rows; ++r) {
            const float* x = a + r * stride;
            vf lanes[4];
            for (auto& lane : lanes) lane = splat(start);
            int64_t i = 0;
            for (; i + 4 * kLanes <= c.width; i += 4 * kLanes)
                for (int j = 0; j < 4; ++j) lanes[j] = f(lanes[j], ::load<vf>(x + i + j * kLanes));
            for (; i + kLanes <= c.width; i += kLanes) lanes[0] = f(lanes[0], ::load<vf>(x + i));
            float found = reduce(f(f(lanes[0], lanes[1]), f(lanes[2], lanes[3])), f);
            for (; i < c.width; ++i) found = f(splat(found), splat(x[i]))[0];
            out[r] = rounded(splat(found * scale), n.dtype)[0];
        }
    }

    void run(int64_t first, int64_t rows, float* registers) const {
        const int64_t floats = register_floats();
        for (int64_t k = 0; k < c.num_instructions; ++k) {
            const RowInstruction& n = c.instructions[k];
            float *out = registers + n.out * floats, *a = registers + n.a * floats;
            float* b = registers + std::max(n.b, 0) * floats;
            switch ((RowOp)n.op) {
            case RowOp::Load: {
                const RowMemory& m = c.memories[n.b];
                if (m.dtype == 0) load<float>(m, c.narrow[n.out], first, rows, out);
                else if (m.dtype == 1) load<BFloat16>(m, c.narrow[n.out], first, rows, out);
                else if (m.dtype == 2) load<Float16>(m, c.narrow[n.out], first, rows, out);
                else load<int64_t>(m, c.narrow[n.out], first, rows, out);
                break;
            }
            case RowOp::Store: store(c.memories[n.b], c.narrow[n.a], first, rows, a); break;
            case RowOp::Add: binary(n, rows, out, a, b, [](vf x, vf y) { return x + y; }); break;
            case RowOp::Sub: binary(n, rows, out, a, b, [](vf x, vf y) { return x - y; }); break;
            case RowOp::Mul: binary(n, rows, out, a, b, [](vf x, vf y) { return x * y; }); break;
            case RowOp::Div: binary(n, rows, out, a, b, [](vf x, vf y) { return x / y; }); break;
            case RowOp::Maximum: binary(n, rows, out, a, b, maximum); break;
            case RowOp::Minimum: binary(n, rows, out, a, b, minimum); break;
            case RowOp::Neg: unary(n, rows, out, a, [](vf x) { return -x; }); break;
            case RowOp::Abs: unary(n, rows, out, a, [](vf x) { return (vf)((vu)x & 0x7fffffffu); }); break;
            case RowOp::Sqrt: unary(n, rows, out, a, roots); break;
            case RowOp::Rsqrt: unary(n, rows, out, a, [](vf x) { return 1.f / roots(x); }); break;
            case RowOp::Reciprocal: unary(n, rows, out, a, [](vf x) { return 1.f / x; }); break;
            case RowOp::Square: unary(n, rows, out, a, [](vf x) { return x * x; }); break;
            case RowOp::Relu: unary(n, rows, out, a, [](vf x) { return select(x < 0.f, vf{}, x); }); break;
            case RowOp::Exp: unary(n, rows, out, a, exp_any); break;
            case RowOp::Sigmoid: unary(n, rows, out, a, [](vf x) { return 1.f / (1.f + exp_any(-x)); }); break;
            case RowOp::Silu: unary(n, rows, out, a, [](vf x) { return x / (1.f + exp_any(-x)); }); break;
            case RowOp::Tanh: unary(n, rows, out, a, tanh_any); break;
            case RowOp::Gelu:
                unary(n, rows, out, a, [](vf x) {
                    return x * 0.5f * (1.f + erf16(x * 0.70710678118654752440f));
                });
                break;
            case RowOp::GeluTanh:
                unary(n, rows, out, a, [](vf x) {
                    const vf inner = 0.79788456080286535588f * (x + 0.044715f * (x * x * x));
                    return 0.5f * x * (1.f + tanh_any(inner));
                });
                break;
            case RowOp::Sin: scalars(n, rows, out, a, [](float x) { return std::sin(x); }); break;
            case RowOp::Cos: scalars(n, rows, out, a, [](float x) { return std::cos(x); }); break;
            case RowOp::Log: scalars(n, rows, out, a, [](float x) { return std::log(x); }); break;
            case RowOp::Softplus:
                scalars(n, rows, out, a, [](float x) { return x > 20.f ? x : std::log1p(std::exp(x)); });
                break;
            case RowOp::Sum: reduction(n, rows, out, a, 0.f, plus, 1.f); break;
            case RowOp::Mean: reduction(n, rows, out, a, 0.f, plus, 1.f / (float)c.width); break;
            case RowOp::Largest: reduction(n, rows, out, a, -kInf, largest, 1.f); break;
            default: unary(n, rows, out, a, [](vf x) { return x; }); break;
            }
        }
    }
};

}  // namespace

extern "C" int hf_paged_rows(const RowsCall* call) {
    const RowsCall& c = *call;
    if (!(c.sizes[0] && c.sizes[1] && c.sizes[2] && c.width)) return 0;
    if (c.num_registers < 1 || !c.instructions || !c.memories || !c.narrow) return 4;
    for (int64_t i = 0; i < c.num_instructions; ++i) {
        const RowInstruction& n = c.instructions[i];
        const bool moves = n.op == (int)RowOp::Load || n.op == (int)RowOp::Store;
        const int64_t others = moves ? c.num_memories : c.num_registers;
        const auto is_register = [&](int64_t number) { return number >= 0 && number < c.num_registers; };
        if (n.op < 0 || n.op >= (int)RowOp::Count || !is_register(n.out) || !is_register(n.a)) return 4;
        if (n.b >= others || (moves && n.b < 0)) return 4;
    }
    Rows rows{c};
    const bool is_alone = rows.num_rows * c.width * c.num_instructions < kFewNumbers;
    const int64_t blocks = (rows.num_rows + rows.block - 1) / rows.block;
    std::atomic<bool> failed{false};
    split_range(blocks, is_alone ? 1 : c.threads, [&](int64_t low, int64_t high, int64_t) {
        static thread_local Scratch scratch;
        float* registers = scratch.get(c.num_registers * rows.register_floats());
        if (!registers) failed.store(true, std::memory_order_relaxed);
        else
            for (int64_t b = low; b < high; ++b)
                rows.run(b * rows.block, std::min(rows.block, rows.num_rows - b * rows.block), registers);
    });
    return failed ? kNoMemory : 0;
}

// Copies rows of a table by index: out[i] = table[numbers[i]]. `bytes`: of a row; strides in bytes.
struct PickCall {
    const char* table;
    const int64_t* numbers;
    char* out;
    int64_t count, table_rows, bytes, table_stride, out_stride;
};

extern "C" int hf_paged_pick(const PickCall* call) {
    const PickCall& c = *call;
    for (int64_t i = 0; i < c.count; ++i)
        if (c.numbers[i] < 0 || c.numbers[i] >= c.table_rows) return 7;
    for (int64_t i = 0; i < c.count; ++i)
        std::memcpy(c.out + i * c.out_stride, c.table + c.numbers[i] * c.table_stride, c.bytes);
    return 0;
}

// Calls functions of this library one after the other, with one team of threads. Stops at the first error, and sets
// `failed` to its entry's index.
struct TapeEntry { int (*function)(const void*); const void* call; };
struct TapeCall { const TapeEntry* entries; int64_t count, *failed, threads; };

extern "C" int hf_paged_tape(const TapeCall* call) {
    const auto run = [&] {
        for (int64_t i = 0; i < call->count; ++i)
            if (const int error = call->entries[i].function(call->entries[i].call)) {
                *call->failed = i;
                return error;
            }
        return 0;
    };
    if (call->threads < 2 || call->count < 2) return run();
    Team team(call->threads);
    int error = 0;
#pragma omp parallel num_threads((int)call->threads)
    {
        if (const int64_t thread = thread_number()) team.follow(thread);
        else {
            Team::current = &team;
            error = run();
            Team::current = nullptr;
            team.end();
        }
    }
    return error;
}
