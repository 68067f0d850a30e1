// Included by kernels.cpp: how kernels divide their work among threads.
//
// A tape opens one OpenMP region for all of its entries. One region per entry would be slow in a process with more
// OpenMP threads than processors, as there are once two Python threads have used OpenMP: at the end of a region its
// threads then go to sleep at once, and the next region has to wake them.

#if defined(_OPENMP)
extern "C" int omp_get_thread_num(void);
#endif

namespace {

constexpr int64_t kPartsPerThread = 4, kNumbersPerPart = 8;

// Threads that compute pieces of work one after the other, each divided into parts. A free thread takes the next part, so
// a thread that loses its processor to another program delays a piece of work by at most one part.
class Team {
    alignas(64) std::atomic<int64_t> left{0};  // parts that no thread has taken; negative: the team's work has ended
    alignas(64) std::atomic<int64_t> unfinished{0};
    // the work in progress; only threads that have taken a part read it, and the leader waits for them
    alignas(64) void (*compute)(const void* work, int64_t part, int64_t thread) = nullptr;
    const void* work = nullptr;

    static void rest(int64_t tries) {
        constexpr int64_t kSpins = 2000;  // they take longer than most entries that run on one thread
        if (tries > kSpins) std::this_thread::yield();
#if defined(__x86_64__)
        else _mm_pause();
#elif defined(__aarch64__)
        else asm volatile("isb");
#endif
    }

    bool compute_part(int64_t thread) {
        int64_t count = left.load(std::memory_order_acquire);
        do
            if (count <= 0) return false;
        while (!left.compare_exchange_weak(count, count - 1, std::memory_order_acq_rel));
        compute(work, count - 1, thread);
        unfinished.fetch_sub(1, std::memory_order_release);
        return true;
    }

  public:
    // The team that this thread leads while it runs a tape; otherwise null.
    static inline thread_local Team* current = nullptr;
    const int64_t size;  // at least the number of the team's threads

    explicit Team(int64_t threads) : size(threads) {}

    void lead(int64_t parts, void (*function)(const void*, int64_t, int64_t), const void* argument) {
        compute = function, work = argument;
        unfinished.store(parts, std::memory_order_relaxed);
        left.store(parts, std::memory_order_release);
        while (compute_part(0)) {}
        for (int64_t tries = 0; unfinished.load(std::memory_order_acquire); ++tries) rest(tries);
    }
    void follow(int64_t thread) {
        for (int64_t tries = 0; left.load(std::memory_order_acquire) >= 0; ++tries) {
            if (compute_part(thread)) tries = 0;
            else rest(tries);
        }
    }
    void end() { left.store(-1, std::memory_order_release); }
};

inline int64_t thread_number() {
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

// Calls body(part, thread) for each of `parts`, the last ones first, on up to `threads` threads, numbered from 0.
template <class Body> void split(int64_t parts, int64_t threads, const Body& body) {
    if (threads < 2 || parts < 2) {
        for (int64_t part = parts - 1; part >= 0; --part) body(part, 0);
        return;
    }
    if (Team::current && Team::current->size <= threads) {
        const auto compute = [](const void* work, int64_t part, int64_t thread) { (*(const Body*)work)(part, thread); };
        Team::current->lead(parts, compute, &body);
        return;
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)threads)
    for (int64_t part = parts - 1; part >= 0; --part) body(part, thread_number());
}

// Calls body(low, high, thread) for ranges that cover [0, count), one to four per thread, as `split` does for parts.
template <class Body> void split_range(int64_t count, int64_t threads, const Body& body) {
    const int64_t most = std::clamp(count / kNumbersPerPart, threads, kPartsPerThread * threads);
    const int64_t parts = threads < 2 ? 1 : std::min(count, most);
    split(parts, threads, [&](int64_t part, int64_t thread) {
        body(count * part / parts, count * (part + 1) / parts, thread);
    });
}

}  // namespace
