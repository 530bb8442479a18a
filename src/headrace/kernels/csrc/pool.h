// Threads that share the work of one operation at a time. The caller is one of them.
#pragma once
#include <cstdint>
#include <mutex>

namespace headrace {

// Sets rounding to nearest and denormals on for a scope (they are part of the results), and puts the caller's back.
class FloatMode {
 public:
  FloatMode();
  ~FloatMode();
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
  uint32_t saved_;
};

class Pool {
 public:
  using Task = void (*)(void* context, int64_t chunk, int thread);

  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // Calls task(context, i, thread) for every i in [0, chunks), each once, and returns when all are done. Chunks are
  // handed out one by one, so a preempted thread holds up only the chunk it has. One run at a time (Device::mutex).
  void run(int64_t chunks, Task task, void* context);

  template <class F>
  void each(int64_t chunks, F&& f) {
    run(chunks, [](void* c, int64_t i, int t) { (*static_cast<F*>(c))(i, t); }, &f);
  }

 private:
  struct State;
  void start();
  int threads_;
  State* state_ = nullptr;
};

}  // namespace headrace
