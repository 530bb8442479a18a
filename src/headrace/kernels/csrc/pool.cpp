#include "pool.h"

#include <unistd.h>

#include <atomic>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace {

namespace {

constexpr auto kSpin = std::chrono::microseconds(50);

void breathe() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// True as soon as `ready` is; false after kSpin.
template <class F>
bool spin_until(F ready) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 64; i++) {
      if (ready()) return true;
      breathe();
    }
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

}  // namespace

#if defined(__x86_64__)
FloatMode::FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
FloatMode::~FloatMode() { _mm_setcsr(saved_); }
#else
FloatMode::FloatMode() : saved_(static_cast<uint32_t>(std::fegetround())) { std::fesetround(FE_TONEAREST); }
FloatMode::~FloatMode() { std::fesetround(static_cast<int>(saved_)); }
#endif

// `ticket` is the only word threads race for: 16 bits of generation, 24 of chunk count, 24 of next chunk. A thread whose
// fetch_add returns next < count owns that chunk of that generation; the job can't end, and its fields can't change,
// before the chunk is counted in `done`. A late thread finds next >= count and has touched nothing else.
struct Pool::State {
  std::atomic<uint64_t> ticket{0};
  std::atomic<int64_t> done{0};
  std::atomic<bool> stop{false};
  Task task = nullptr;
  void* context = nullptr;
  pid_t owner = getpid();
  alignas(64) std::atomic<int> sleepers{0};
  std::mutex mutex;
  std::condition_variable wake;
  std::vector<std::thread> workers;

  static constexpr uint64_t kField = (1u << 24) - 1;
  static uint64_t next_of(uint64_t t) { return t & kField; }
  static uint64_t count_of(uint64_t t) { return t >> 24 & kField; }

  void work(int thread) {
    for (;;) {
      // Look before adding, so that idle threads don't wear the counter out.
      const uint64_t seen = ticket.load(std::memory_order_acquire);
      if (next_of(seen) >= count_of(seen)) return;
      const uint64_t mine = ticket.fetch_add(1, std::memory_order_acq_rel);
      if (next_of(mine) >= count_of(mine)) return;
      task(context, static_cast<int64_t>(next_of(mine)), thread);
      done.fetch_add(1, std::memory_order_release);
    }
  }

  bool pending() {
    const uint64_t t = ticket.load(std::memory_order_acquire);
    return next_of(t) < count_of(t) || stop.load(std::memory_order_relaxed);
  }

  void loop(int thread) {
    FloatMode mode;
    while (!stop.load(std::memory_order_relaxed)) {
      if (!spin_until([&] { return pending(); })) {
        std::unique_lock<std::mutex> lock(mutex);
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        wake.wait(lock, [&] { return pending(); });
        sleepers.fetch_sub(1, std::memory_order_relaxed);
      }
      work(thread);
    }
  }
};

Pool::Pool(int threads) : threads_(threads < 1 ? 1 : threads) { start(); }

void Pool::start() {
  state_ = new State;
  for (int i = 1; i < threads_; i++) state_->workers.emplace_back([s = state_, i] { s->loop(i); });
}

Pool::~Pool() {
  if (state_->owner != getpid()) return;  // a fork's child: the threads are the parent's, the state is left alone
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stop.store(true);
  }
  state_->wake.notify_all();
  for (auto& w : state_->workers) w.join();
  delete state_;
}

void Pool::run(int64_t chunks, Task task, void* context) {
  if (threads_ == 1 || chunks <= 1 || chunks >= static_cast<int64_t>(State::kField / 2)) {
    for (int64_t i = 0; i < chunks; i++) task(context, i, 0);
    return;
  }
  if (state_->owner != getpid()) start();  // after a fork: the old state may be locked for ever, so it is leaked
  State& s = *state_;
  s.task = task;
  s.context = context;
  s.done.store(0, std::memory_order_relaxed);
  const uint64_t generation = (s.ticket.load(std::memory_order_relaxed) >> 48) + 1;
  s.ticket.store(generation << 48 | static_cast<uint64_t>(chunks) << 24, std::memory_order_seq_cst);
  if (s.sleepers.load(std::memory_order_seq_cst) > 0) {
    std::lock_guard<std::mutex> lock(s.mutex);
    s.wake.notify_all();
  }
  s.work(0);
  const auto finished = [&] { return s.done.load(std::memory_order_acquire) == chunks; };
  while (!spin_until(finished)) std::this_thread::yield();
}

}  // namespace headrace
