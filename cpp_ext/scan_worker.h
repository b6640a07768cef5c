// A pool of threads that scans keys, or attends to keys and values, beside whatever else the process does.
//
// Not OpenMP: torch's own pool must not be shared, and a parked thread must cost nothing. A job (all sequences and
// heads of one layer) is cut into chunks of one KV head's consecutive tokens, which threads take from an atomic counter,
// so no thread ends much later than another. The mutex guards everything else and is held for nanoseconds.
//
// Life of a job: submit -> [held -> start] -> ready -> done -> wait (which frees its slot). Ready jobs are scanned in the
// order in which they were started; a thread that finds no chunk left in one goes on to the next.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "kernels/scan.h"

namespace hybridgen {

// Pointers to memory that stays alive and in place until the job has been waited for. Strides in elements.
//   query  [batch, num_heads, head_dim]           fp32, contiguous; read when the job runs, not when it is submitted
//   keys   [batch, num_kv_heads, tokens, head_dim] of key_type, channel stride 1; of a sketch bytes
//          [batch, num_kv_heads, blocks, sketch_bytes], byte stride 1: kernels/scan.h says what is in them
//   key_scales  [batch, num_kv_heads, tokens]     fp32, token stride 1: of int8 keys only
//   key_mean    [batch, num_kv_heads, head_dim]   fp32, contiguous, or null for zero: what was taken off int8 keys or a
//          sketch's; every logit of a head gets scale * query . mean
//   rows   [batch, num_kv_heads, rows_stride]     contiguous, or null; read when the job runs. With it, only the rows
//          rows[b, h, :lengths[b]] of the keys are scanned, in this order
//   out    [batch, num_heads, tokens]             fp32, token stride 1; only out[b, :, :lengths[b]] is written
//   halves, maxima    in place of out, for the link to a GPU: a logit of token t is halves[b, h, t] (fp16, strides those
//          of out) + maxima[b, h, t / kLinkTokens] (fp32, [batch, num_heads, maxima_stride], contiguous)
// With values the job is attention over all these tokens in place of their logits; then neither `rows` nor `out`:
//   values [batch, num_kv_heads, tokens, head_dim] of value_type, channel stride 1
//   context [batch, num_heads, head_dim]          fp32, contiguous; 0 where there is no token
//   log_sum [batch, num_heads]                    fp32, contiguous: log sum exp(logit); -inf where there is no token
struct ScanRequest {
  const float* query = nullptr;
  const void* keys = nullptr;
  float* out = nullptr;
  std::uint16_t* halves = nullptr;
  float* maxima = nullptr;
  std::int64_t maxima_stride = 0;
  KeyType key_type = KeyType::Float32;
  std::int64_t num_heads = 0;
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;
  std::vector<std::int64_t> lengths;  // tokens to scan, for each sequence; with `rows`, of each of its KV heads
  std::int64_t key_batch_stride = 0, key_head_stride = 0;
  std::int64_t key_token_stride = 0;  // of a sketch: from block to block
  std::int64_t out_batch_stride = 0, out_head_stride = 0;
  float scale = 1.0f;
  const std::int32_t* rows = nullptr;
  std::int64_t rows_stride = 0;
  const float* key_scales = nullptr;
  std::int64_t scale_batch_stride = 0, scale_head_stride = 0;
  const float* key_mean = nullptr;
  const void* values = nullptr;
  KeyType value_type = KeyType::Float32;
  std::int64_t value_batch_stride = 0, value_head_stride = 0, value_token_stride = 0;
  float* context = nullptr;
  float* log_sum = nullptr;
};

class ScanWorker {
 public:
  using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC, as Python's time.perf_counter
  using JobId = std::int64_t;
  struct Span {
    Clock::time_point start, end;  // of the first and the last chunk
    std::int64_t read_bytes = 0;   // keys, and what belongs to them, and values
  };
  struct StartCall {
    void (*function)(void*);
    void* data;
  };

  // threads >= 0 (0: whoever waits does the work); thread i runs on cores[i % size] only, or anywhere if empty.
  ScanWorker(int threads, const std::vector<int>& cores, const std::string& isa);
  ~ScanWorker();
  ScanWorker(const ScanWorker&) = delete;
  ScanWorker& operator=(const ScanWorker&) = delete;

  // std::invalid_argument: a bad request, an unknown job. std::runtime_error: closed, or in the child of a fork.
  JobId submit(ScanRequest request, bool hold);
  void start(JobId id);
  // A plain function for a thread that must not know Python, for example CUDA's callback thread. Calling it later than
  // the wait, after close() or a second time is harmless.
  StartCall start_call(JobId id);
  // For a held job, in place of a start call: it starts when the word at `start` has reached `turn` (it wraps around),
  // and `turn` is written to `done` when it is done, or on close(). Both lie in memory that a GPU sees, whose streams
  // write the one and wait for the other: no thread of ours stands between. Jobs are looked at in the order in which
  // they were given; meanwhile idle threads do not park. Needs threads > 0.
  void watch(JobId id, const std::uint32_t* start, std::uint32_t* done, std::uint32_t turn);
  bool done(JobId id);
  // Empty after `timeout`; then the job can be waited for again.
  std::optional<Span> wait(JobId id, bool help, Clock::duration timeout);

  // Threads stop after the chunks that they have taken, two at most; waiters get a runtime_error; no buffer is touched
  // after it returns.
  void close();

  // False while a start call is out, or in the child of a fork, where the threads do not exist and the mutex may be
  // locked for ever: then the memory has to be left alone.
  bool may_be_deleted();

  int threads() const { return num_threads_; }
  const IsaKernels& isa() const { return isa_; }
  std::int64_t jobs_done() const { return jobs_done_.load(); }

 private:
  enum class State { Free, Held, Ready, Done };
  struct Job;
  using Lock = std::unique_lock<std::mutex>;

  void check_process() const;
  Job& find(JobId id);
  Job& new_slot();
  void cut(Job& job) const;
  static void fill_empty(const ScanRequest& request);
  void make_ready(Job& job);
  void start_watched();
  void look_at(const std::uint32_t* word, std::uint32_t turn, std::uint64_t seen) const;
  void finish(Job& job);
  void release(Job& job);
  Job* first_ready() const;
  void unlink(Job& job);
  void work_on(Job& job, Lock& lock);
  struct Chunk;
  static Chunk chunk_of(const Job& job, std::int64_t chunk);
  static ScanBlock block_of(const Job& job, const Chunk& chunk, const float** mean);
  static WeighBlock values_of(const Job& job, const Chunk& chunk);
  // Returns the bytes that it read. next: the chunk that this thread scans after it; job.chunks if it has none yet.
  std::int64_t scan_chunk(Job& job, std::int64_t chunk, std::int64_t next) const;
  void scan_for_link(const Job& job, const Chunk& chunk, ScanBlock block) const;
  void attend_chunk(Job& job, std::int64_t number, const Chunk& chunk, ScanBlock keys) const;
  void thread_loop();
  void start_from_call(Job& job);

  const IsaKernels& isa_;
  const int num_threads_;
  const pid_t process_;
  std::vector<std::thread> threads_;
  std::mutex join_mutex_;

  std::mutex mutex_;
  std::condition_variable work_cv_;  // threads: something is ready, or closing
  std::condition_variable wait_cv_;  // waiters: started, done, or closing
  std::vector<std::unique_ptr<Job>> slots_;  // never shrinks: jobs keep their address, and a steady state allocates none
  std::vector<Job*> free_;
  std::deque<Job*> watched_;
  Job* ready_first_ = nullptr;
  Job* ready_last_ = nullptr;
  std::int64_t last_serial_ = 0;
  int active_ = 0;         // threads and helpers inside work_on
  int pending_calls_ = 0;  // start calls handed out and not yet called
  std::atomic<bool> closing_{false};
  std::atomic<std::uint64_t> started_{0};  // jobs made ready: what idle threads look at before they park
  std::atomic<std::int64_t> jobs_done_{0};
};

}  // namespace hybridgen
