// GNU OpenMP's entry points that the C++ kernels use, as plain threads: compiled into the library of
// `tests.support.sanitize thread`. libgomp is not built for ThreadSanitizer, which would take each end of its parallel
// regions for a race; std::thread's starts and joins it sees.

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#define HIDDEN extern "C" __attribute__((visibility("hidden")))

namespace {

struct Team {
    const int size;
    std::atomic<long> next{0};  // of a dynamic loop, of which a region has one
    long end = 0, step = 0;
    std::mutex mutex;
    std::condition_variable arrived;
    int waiting = 0;
    unsigned long turn = 0;

    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        const unsigned long mine = turn;
        if (++waiting == size) {
            waiting = 0, ++turn;
            arrived.notify_all();
        } else {
            arrived.wait(lock, [&] { return turn != mine; });
        }
    }
};

thread_local Team* team = nullptr;
thread_local int number = 0;

void run(Team& all, void (*function)(void*), void* data) {
    const auto work = [&](int mine) {
        Team* before = team;
        team = &all, number = mine;
        function(data);
        team = before, number = 0;
    };
    std::vector<std::thread> others;
    for (int i = 1; i < all.size; ++i) others.emplace_back(work, i);
    work(0);
    for (std::thread& other : others) other.join();
}

}  // namespace

HIDDEN int omp_get_num_threads() { return team ? team->size : 1; }
HIDDEN int omp_get_thread_num() { return number; }
HIDDEN void GOMP_barrier() {
    if (team) team->wait();
}
HIDDEN void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned) {
    Team all{(int)(threads ? threads : 1)};
    run(all, function, data);
}
HIDDEN bool GOMP_loop_nonmonotonic_dynamic_next(long* from, long* to) {
    const long at = team->next.fetch_add(team->step, std::memory_order_relaxed);
    if (team->step > 0 ? at >= team->end : at <= team->end) return false;
    *from = at, *to = at + team->step;
    return true;
}
HIDDEN bool GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long step, long, long* from, long* to) {
    {
        const std::lock_guard<std::mutex> lock(team->mutex);
        if (!team->step) team->next = start, team->end = end, team->step = step;  // the first one that comes
    }
    return GOMP_loop_nonmonotonic_dynamic_next(from, to);
}
HIDDEN void GOMP_loop_end_nowait() {}
