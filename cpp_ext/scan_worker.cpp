#include "scan_worker.h"

#include <pthread.h>
#include <signal.h>
#if defined(__linux__)
#include <sys/prctl.h>
#endif
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "dispatch.h"
#include "partial_attention.h"

namespace hybridgen {
namespace {

constexpr int kSlotBits = 24;  // a job id is a serial number and, below it, the slot
constexpr std::int64_t kRowStep = 16;  // chunks begin at multiples of it: 64 bytes of out, so lines have one writer
constexpr std::int64_t kMinChunkBytes = 16 << 10;
constexpr std::int64_t kMaxChunkBytes = 128 << 10;  // 10 to 20 us of one thread
constexpr std::int64_t kMaxAttendBytes = 256 << 10;  // keys and values
constexpr std::int64_t kChunksPerThread = 16;
constexpr auto kSpin = std::chrono::microseconds(5);
constexpr auto kLockSpin = std::chrono::microseconds(20);  // fifteen threads that come at once are through in less
constexpr auto kPatience = std::chrono::milliseconds(2);  // a watched word is looked at all the time, then now and then
constexpr auto kNap = std::chrono::microseconds(20);

bool has_reached(const std::uint32_t* word, std::uint32_t turn) {
  return static_cast<std::int32_t>(__atomic_load_n(word, __ATOMIC_ACQUIRE) - turn) >= 0;
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Waits for a moment, without parking, until `ready()`.
template <class Ready>
void spin(Ready ready) {
  const auto until = ScanWorker::Clock::now() + kSpin;
  while (!ready() && ScanWorker::Clock::now() < until) {
    for (int i = 0; i < 8; ++i) pause();
  }
}

// Locks the worker's mutex, which is held for nanoseconds: by threads that all begin a job, or end it, at the same
// moment. Whoever is put to sleep for it is woken by the one before, and comes back after many microseconds, when the
// others have done his share or wait for him.
void lock_soon(std::unique_lock<std::mutex>& lock) {
  if (lock.try_lock()) return;
  const auto until = ScanWorker::Clock::now() + kLockSpin;
  while (ScanWorker::Clock::now() < until) {
    for (int i = 0; i < 4; ++i) pause();
    if (lock.try_lock()) return;
  }
  lock.lock();
}

std::int64_t element_bytes(KeyType type) {
  return type == KeyType::Float32 ? 4 : type == KeyType::Float16 || type == KeyType::BFloat16 ? 2 : 1;
}

std::int64_t block_bytes(const ScanRequest& r) {
  return sketch_bytes(r.key_type == KeyType::Int4 ? 4 : 2, r.head_dim);
}

// Bytes that this many tokens of one KV head take, rounded up to whole blocks of a sketch.
std::int64_t token_bytes(const ScanRequest& r, std::int64_t tokens) {
  if (is_sketch(r.key_type)) return (tokens + kSketchTokens - 1) / kSketchTokens * block_bytes(r);
  return tokens * (r.head_dim * element_bytes(r.key_type) + (r.key_type == KeyType::Int8 ? 4 : 0));
}

// The same of keys and, where they are wanted, values.
std::int64_t kv_bytes(const ScanRequest& r, std::int64_t tokens) {
  return token_bytes(r, tokens) + (r.values ? tokens * r.head_dim * element_bytes(r.value_type) : 0);
}

// What a kernel reads of the keys for this block.
std::int64_t bytes_of(const ScanRequest& r, const ScanBlock& block) {
  if (!is_sketch(r.key_type) || !block.list) return token_bytes(r, block.rows);
  std::int64_t blocks = 0;
  std::int32_t held = -1;
  for (std::int64_t j = 0; j < block.rows; ++j) {
    const std::int32_t at = block.list[j] / static_cast<std::int32_t>(kSketchTokens);
    blocks += at != held;
    held = at;
  }
  return blocks * block_bytes(r);
}

// The mean's part in each logit of these heads: shifts[g] = query[g] . mean. Plain loops: it is one row of a chunk.
void shift_heads(const float* query, const float* mean, std::int64_t head_dim, std::vector<float>& shifts) {
  for (float& shift : shifts) {
    float sums[8] = {};
    for (std::int64_t c = 0; mean && c < head_dim; c += 8) {
      for (int i = 0; i < 8; ++i) sums[i] += query[c + i] * mean[c + i];
    }
    shift = ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
    query += head_dim;
  }
}

void require(bool good, const std::string& argument, std::int64_t value, const std::string& allowed) {
  if (!good) throw std::invalid_argument(argument + "=" + std::to_string(value) + ": must be " + allowed);
}

// Everything that can be known without touching the memory.
void check(const ScanRequest& r) {
  require(r.num_kv_heads > 0, "num_kv_heads", r.num_kv_heads, "positive");
  require(r.num_heads > 0 && r.num_heads % r.num_kv_heads == 0, "num_heads", r.num_heads,
          "a positive multiple of num_kv_heads=" + std::to_string(r.num_kv_heads));
  require(r.head_dim > 0 && r.head_dim % 8 == 0, "head_dim", r.head_dim, "a positive multiple of 8");
  require(!r.lengths.empty(), "len(lengths)", 0, "at least 1 (one length for each sequence)");
  std::int64_t longest = 0;
  for (std::size_t b = 0; b < r.lengths.size(); ++b) {
    require(r.lengths[b] >= 0, "lengths[" + std::to_string(b) + "]", r.lengths[b], "0 or more");
    longest = std::max(longest, r.lengths[b]);
  }
  if (!std::isfinite(r.scale)) throw std::invalid_argument("scale=" + std::to_string(r.scale) + ": must be finite");

  const auto pointer = [&](const char* name, const void* p, std::int64_t alignment, bool needed) {
    const auto value = reinterpret_cast<std::uintptr_t>(p);
    const std::string allowed = "a non-null address, a multiple of " + std::to_string(alignment);
    require((p || !needed) && value % static_cast<std::uintptr_t>(alignment) == 0, name,
            static_cast<std::int64_t>(value), allowed);
  };
  pointer("query", r.query, 4, true);
  pointer("keys", r.keys, element_bytes(r.key_type), longest > 0);  // an empty tensor's address is null
  pointer("out", r.out, 4, longest > 0 && !r.values && !r.halves);
  pointer("halves", r.halves, 2, false);
  pointer("maxima", r.maxima, 4, r.halves != nullptr);
  const std::int64_t maxima = (longest + kLinkTokens - 1) / kLinkTokens;
  require(!r.halves || r.maxima_stride >= maxima, "maxima_stride", r.maxima_stride,
          "at least one for each " + std::to_string(kLinkTokens) + " tokens, " + std::to_string(maxima));
  pointer("rows", r.rows, 4, false);
  const bool scaled = r.key_type == KeyType::Int8;
  const bool sketch = is_sketch(r.key_type);
  pointer("key_scales", r.key_scales, 4, scaled && longest > 0);
  pointer("key_mean", r.key_mean, 4, false);
  const auto unused = [](const char* name, const float* p, const char* allowed) {
    require(!p, name, static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(p)), allowed);
  };
  if (!scaled) unused("key_scales", r.key_scales, "0 unless key_type is int8");
  if (!scaled && !sketch) unused("key_mean", r.key_mean, "0 unless key_type is int8, int4 or int2");
  require(!sketch || r.head_dim <= kMaxSketchDim, "head_dim", r.head_dim,
          "at most " + std::to_string(kMaxSketchDim) + " for sketches");

  // The stride of a dimension of size 1 means nothing. Sequences or heads may share keys (stride 0), never logits.
  const bool batched = r.lengths.size() > 1;
  const std::string apart = "at least the longest length, " + std::to_string(longest);
  require(!batched || r.key_batch_stride >= 0, "key_strides[0] (batch)", r.key_batch_stride, "0 or more");
  require(r.num_kv_heads == 1 || r.key_head_stride >= 0, "key_strides[1] (head)", r.key_head_stride, "0 or more");
  if (sketch) {
    require(longest <= kSketchTokens || r.key_token_stride >= block_bytes(r), "key_strides[2] (block)",
            r.key_token_stride, "at least the bytes of a block, " + std::to_string(block_bytes(r)));
  } else {
    require(longest < 2 || r.key_token_stride >= r.head_dim, "key_strides[2] (token)", r.key_token_stride,
            "at least head_dim=" + std::to_string(r.head_dim));
  }
  require(!batched || r.scale_batch_stride >= 0, "scale_strides[0] (batch)", r.scale_batch_stride, "0 or more");
  require(r.num_kv_heads == 1 || r.scale_head_stride >= 0, "scale_strides[1] (head)", r.scale_head_stride, "0 or more");
  if (!r.values) {
    require(!batched || r.out_batch_stride >= longest, "out_strides[0] (batch)", r.out_batch_stride, apart);
    require(r.num_heads == 1 || r.out_head_stride >= longest, "out_strides[1] (head)", r.out_head_stride, apart);
  }
  require(!r.rows || r.rows_stride >= longest, "rows_stride", r.rows_stride, apart);
}

// What attention needs beside the keys.
void check_values(const ScanRequest& r) {
  const auto pointer = [](const char* name, const void* p, std::int64_t alignment) {
    const auto value = reinterpret_cast<std::uintptr_t>(p);
    require(p && value % static_cast<std::uintptr_t>(alignment) == 0, name, static_cast<std::int64_t>(value),
            "a non-null address, a multiple of " + std::to_string(alignment));
  };
  pointer("values", r.values, element_bytes(r.value_type));
  pointer("context", r.context, 4);
  pointer("log_sum", r.log_sum, 4);
  if (is_sketch(r.key_type)) throw std::invalid_argument("key_type: must not be a sketch where there are values");
  require(static_cast<int>(r.value_type) < kValueTypes, "value_type", static_cast<int>(r.value_type), "a float's");
  const std::int64_t longest = *std::max_element(r.lengths.begin(), r.lengths.end());
  require(r.lengths.size() == 1 || r.value_batch_stride >= 0, "value_strides[0] (batch)", r.value_batch_stride,
          "0 or more");
  require(r.num_kv_heads == 1 || r.value_head_stride >= 0, "value_strides[1] (head)", r.value_head_stride, "0 or more");
  require(longest < 2 || r.value_token_stride >= r.head_dim, "value_strides[2] (token)", r.value_token_stride,
          "at least head_dim=" + std::to_string(r.head_dim));
}

}  // namespace

struct ScanWorker::Job {
  ScanWorker* worker = nullptr;
  std::int64_t slot = 0;

  // Written under the mutex before the job is ready, read freely by the threads that work on it.
  ScanRequest request;
  std::int64_t chunk_rows = 0;
  std::vector<std::int64_t> first_chunk;  // [batch + 1]: where each sequence's chunks begin
  std::int64_t chunks = 0;
  // Of attention: what the chunks come to, and how many of each sequence's KV head are not done yet. Whoever does the
  // last of them merges that head's.
  Parts parts;
  std::vector<std::atomic<std::int64_t>> unfinished;

  // Under the mutex.
  JobId id = -1;
  Job* next_ready = nullptr;
  bool linked = false;        // in the list of ready jobs
  bool waited_for = false;    // somebody is in wait()
  bool call_pending = false;  // a start call is out
  const std::uint32_t* start_word = nullptr;  // of a watched job
  std::uint32_t* done_word = nullptr;
  std::uint32_t turn = 0;
  int workers = 0;            // inside work_on
  Span span{};

  std::atomic<State> state{State::Free};  // changed under the mutex
  alignas(64) std::atomic<std::int64_t> next_chunk{0};

  bool exhausted() const { return next_chunk.load(std::memory_order_relaxed) >= chunks; }
};

ScanWorker::ScanWorker(int threads, const std::vector<int>& cores, const std::string& isa)
    : isa_(select_isa(isa)), num_threads_(threads), process_(getpid()) {
  require(threads >= 0 && threads <= 1024, "threads", threads, "between 0 and 1024");
  // Signals belong to Python's threads; ours inherit this mask.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (int i = 0; i < threads; ++i) {
      threads_.emplace_back(&ScanWorker::thread_loop, this);
#if defined(__linux__)
      pthread_setname_np(threads_.back().native_handle(), ("scan-" + std::to_string(i)).c_str());
      if (!cores.empty()) {
        const std::size_t k = static_cast<std::size_t>(i) % cores.size();
        cpu_set_t set;
        CPU_ZERO(&set);
        if (cores[k] >= 0 && cores[k] < CPU_SETSIZE) CPU_SET(cores[k], &set);
        require(pthread_setaffinity_np(threads_.back().native_handle(), sizeof set, &set) == 0,
                "cores[" + std::to_string(k) + "]", cores[k], "a core that this process may run on");
      }
#endif
    }
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    close();
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

ScanWorker::~ScanWorker() { close(); }

void ScanWorker::check_process() const {
  if (getpid() != process_) {
    throw std::runtime_error("this ScanWorker belongs to process " + std::to_string(process_) +
                             "; its threads do not survive a fork: create one in the child");
  }
}

// ---- Slots ----------------------------------------------------------------------------------------------------------

ScanWorker::Job& ScanWorker::find(JobId id) {
  const auto slot = static_cast<std::size_t>(id & ((std::int64_t{1} << kSlotBits) - 1));
  if (id < 0 || slot >= slots_.size() || slots_[slot]->id != id) {
    throw std::invalid_argument("job=" + std::to_string(id) + ": unknown, or already waited for");
  }
  return *slots_[slot];
}

ScanWorker::Job& ScanWorker::new_slot() {
  if (free_.empty()) {
    if (slots_.size() >> kSlotBits) throw std::runtime_error("too many jobs that nobody has waited for");
    slots_.push_back(std::make_unique<Job>());
    slots_.back()->worker = this;
    slots_.back()->slot = static_cast<std::int64_t>(slots_.size()) - 1;
    free_.push_back(slots_.back().get());
  }
  Job& job = *free_.back();
  free_.pop_back();
  return job;
}

void ScanWorker::release(Job& job) {
  job.id = -1;
  job.start_word = nullptr;
  job.done_word = nullptr;
  job.state = State::Free;
  if (!job.call_pending) free_.push_back(&job);  // else the late call must still find a job that is not startable
}

// ---- A job's way ----------------------------------------------------------------------------------------------------

// Chunks small enough that all threads end together, large enough that taking one costs nothing.
void ScanWorker::cut(Job& job) const {
  const ScanRequest& r = job.request;
  const std::int64_t step = r.halves ? kLinkTokens : is_sketch(r.key_type) ? kSketchTokens : kRowStep;
  const std::int64_t step_bytes = kv_bytes(r, step);
  std::int64_t bytes = 0;
  for (std::int64_t length : r.lengths) bytes += r.num_kv_heads * kv_bytes(r, length);
  const std::int64_t share = bytes / (kChunksPerThread * (num_threads_ + 1));
  const std::int64_t most = r.values ? kMaxAttendBytes : kMaxChunkBytes;
  job.chunk_rows = std::max<std::int64_t>(1, std::clamp(share, kMinChunkBytes, most) / step_bytes) * step;
  job.first_chunk.assign(1, 0);
  for (std::int64_t length : r.lengths) {
    const std::int64_t blocks = (length + job.chunk_rows - 1) / job.chunk_rows;
    job.first_chunk.push_back(job.first_chunk.back() + blocks * r.num_kv_heads);
  }
  job.chunks = job.first_chunk.back();
  if (!r.values) return;
  job.parts.resize(job.chunks, r.num_heads / r.num_kv_heads, r.head_dim);
  const std::size_t heads = r.lengths.size() * static_cast<std::size_t>(r.num_kv_heads);
  if (job.unfinished.size() < heads) job.unfinished = std::vector<std::atomic<std::int64_t>>(heads);
  for (std::size_t i = 0; i < heads; ++i) {
    const std::size_t b = i / static_cast<std::size_t>(r.num_kv_heads);
    job.unfinished[i] = (job.first_chunk[b + 1] - job.first_chunk[b]) / r.num_kv_heads;
  }
}

// The result of sequences without a token: no chunk of theirs is ever taken. Not before the job has started: until then
// somebody may still read what the job before has left there.
void ScanWorker::fill_empty(const ScanRequest& r) {
  for (std::size_t b = 0; b < r.lengths.size(); ++b) {
    if (r.lengths[b] > 0) continue;
    const auto first = static_cast<std::int64_t>(b) * r.num_heads;
    std::fill_n(r.context + first * r.head_dim, r.num_heads * r.head_dim, 0.0f);
    std::fill_n(r.log_sum + first, r.num_heads, -std::numeric_limits<float>::infinity());
  }
}

ScanWorker::JobId ScanWorker::submit(ScanRequest request, bool hold) {
  check_process();
  check(request);
  if (request.values) check_values(request);
  Lock lock(mutex_);
  if (closing_) throw std::runtime_error("this ScanWorker is closed");
  Job& job = new_slot();
  job.request = std::move(request);
  cut(job);
  job.id = (++last_serial_ << kSlotBits) | job.slot;
  job.waited_for = false;
  job.span = {};
  job.next_chunk = 0;
  job.state = State::Held;
  const JobId id = job.id;
  if (!hold) make_ready(job);
  lock.unlock();
  if (!hold) work_cv_.notify_one();
  return id;
}

void ScanWorker::start(JobId id) {
  check_process();
  Lock lock(mutex_);
  Job& job = find(id);
  if (closing_) throw std::runtime_error("this ScanWorker is closed");
  if (job.state != State::Held || job.start_word) {
    throw std::invalid_argument("job=" + std::to_string(id) + ": must be a held job that was not started yet");
  }
  make_ready(job);
  lock.unlock();
  work_cv_.notify_one();
}

ScanWorker::StartCall ScanWorker::start_call(JobId id) {
  check_process();
  Lock lock(mutex_);
  Job& job = find(id);
  if (closing_) throw std::runtime_error("this ScanWorker is closed");
  if (job.state != State::Held || job.call_pending || job.start_word) {
    throw std::invalid_argument("job=" + std::to_string(id) + ": must be a held job without a start call yet");
  }
  job.call_pending = true;
  ++pending_calls_;
  const auto call = [](void* data) {
    Job& started = *static_cast<Job*>(data);
    started.worker->start_from_call(started);
  };
  return {call, &job};
}

void ScanWorker::start_from_call(Job& job) {
  Lock lock(mutex_);
  if (!job.call_pending) return;
  job.call_pending = false;
  --pending_calls_;
  if (job.state == State::Free) free_.push_back(&job);  // started otherwise and waited for meanwhile
  if (job.state != State::Held || closing_) return;
  make_ready(job);
  // Notified with the mutex held: once it is free, nothing keeps the worker from being closed and deleted.
  work_cv_.notify_one();
}

void ScanWorker::watch(JobId id, const std::uint32_t* start, std::uint32_t* done, std::uint32_t turn) {
  check_process();
  require(num_threads_ > 0, "threads", num_threads_, "positive, for somebody has to watch");
  require(start && done, "start, done", 0, "non-null addresses");
  Lock lock(mutex_);
  Job& job = find(id);
  if (closing_) throw std::runtime_error("this ScanWorker is closed");
  if (job.state != State::Held || job.call_pending || job.start_word) {
    throw std::invalid_argument("job=" + std::to_string(id) + ": must be a held job that nothing is to start yet");
  }
  job.start_word = start;
  job.done_word = done;
  job.turn = turn;
  watched_.push_back(&job);
  lock.unlock();
  work_cv_.notify_all();  // all are awake when the word comes
}

// Makes ready what has been waited for. The mutex is held.
void ScanWorker::start_watched() {
  while (!watched_.empty() && has_reached(watched_.front()->start_word, watched_.front()->turn)) {
    Job& job = *watched_.front();
    watched_.pop_front();
    if (job.state == State::Held) make_ready(job);
  }
}

// Until the word is there, or something else has been made ready.
void ScanWorker::look_at(const std::uint32_t* word, std::uint32_t turn, std::uint64_t seen) const {
  const auto patient = Clock::now() + kPatience;
  while (!has_reached(word, turn) && started_ == seen && !closing_) {
    for (int i = 0; i < 8; ++i) pause();
    if (Clock::now() > patient) std::this_thread::sleep_for(kNap);
  }
}

// The mutex is held; the caller then notifies one thread, and threads that find work wake others (work_on): a CUDA
// callback pays for one wake-up, not for fifteen.
void ScanWorker::make_ready(Job& job) {
  job.state = State::Ready;
  if (job.request.values) fill_empty(job.request);
  if (job.chunks == 0) {
    job.span.start = job.span.end = Clock::now();
    finish(job);
    return;
  }
  job.next_ready = nullptr;
  job.linked = true;
  (ready_last_ ? ready_last_->next_ready : ready_first_) = &job;
  ready_last_ = &job;
  ++started_;
  wait_cv_.notify_all();  // its waiter may want to help
}

ScanWorker::Job* ScanWorker::first_ready() const {
  Job* job = ready_first_;
  while (job && job->exhausted()) job = job->next_ready;
  return job;
}

void ScanWorker::unlink(Job& job) {
  if (!job.linked) return;
  job.linked = false;
  Job* previous = nullptr;
  for (Job* j = ready_first_; j != &job; j = j->next_ready) previous = j;
  (previous ? previous->next_ready : ready_first_) = job.next_ready;
  if (ready_last_ == &job) ready_last_ = previous;
}

// Takes chunks until there are none left. The mutex is held on entry and on return.
void ScanWorker::work_on(Job& job, Lock& lock) {
  ++active_;
  if (job.workers++ == 0 && job.span.start == Clock::time_point{}) job.span.start = Clock::now();
  const bool more = job.chunks - job.next_chunk > 1;
  lock.unlock();
  for (int i = 0; more && i < 2; ++i) work_cv_.notify_one();

  const auto take = [&] {
    if (closing_.load(std::memory_order_relaxed)) return job.chunks;
    return std::min(job.chunks, job.next_chunk.fetch_add(1, std::memory_order_relaxed));
  };
  std::int64_t read_bytes = 0;
  for (std::int64_t chunk = take(); chunk < job.chunks;) {
    // The next chunk is taken before this one is scanned, so that its keys are on their way when this one ends. Not the
    // last chunks: they are for threads that have nothing.
    const bool plenty = job.chunks - chunk > 2 * (num_threads_ + 1);
    const std::int64_t next = plenty ? take() : job.chunks;
    read_bytes += scan_chunk(job, chunk, next);
    chunk = plenty ? next : take();
  }

  const auto end = Clock::now();
  lock_soon(lock);
  job.span.end = std::max(job.span.end, end);
  job.span.read_bytes += read_bytes;
  --active_;
  --job.workers;
  if (job.exhausted()) {  // else closing: abandoned
    unlink(job);
    if (job.workers == 0) finish(job);  // whoever took a chunk has scanned it before leaving
  }
  if (closing_) wait_cv_.notify_all();
}

void ScanWorker::finish(Job& job) {
  ++jobs_done_;
  job.state = State::Done;
  if (job.done_word) __atomic_store_n(job.done_word, job.turn, __ATOMIC_RELEASE);
  wait_cv_.notify_all();
}

// Which rows a chunk has.
struct ScanWorker::Chunk {
  std::int64_t sequence, head;        // KV head
  std::int64_t token, rows;           // from `token` on
  std::int64_t first_of_head, count;  // the chunks of this head
};

ScanWorker::Chunk ScanWorker::chunk_of(const Job& job, std::int64_t chunk) {
  const auto after = std::upper_bound(job.first_chunk.begin(), job.first_chunk.end(), chunk);
  const std::int64_t b = after - job.first_chunk.begin() - 1;
  const std::int64_t length = job.request.lengths[static_cast<std::size_t>(b)];
  const std::int64_t count = (length + job.chunk_rows - 1) / job.chunk_rows;
  const std::int64_t head = (chunk - *(after - 1)) / count;
  const std::int64_t first_of_head = *(after - 1) + head * count;
  const std::int64_t token = (chunk - first_of_head) * job.chunk_rows;
  return {b, head, token, std::min(job.chunk_rows, length - token), first_of_head, count};
}

// The keys of a chunk; everything but `next` and, where the key type has them, `shifts`.
ScanBlock ScanWorker::block_of(const Job& job, const Chunk& chunk, const float** mean) {
  const ScanRequest& r = job.request;
  const std::int64_t b = chunk.sequence, head = chunk.head, token = chunk.token;
  ScanBlock block{};
  block.group = r.num_heads / r.num_kv_heads;
  block.head_dim = r.head_dim;
  block.rows = chunk.rows;
  block.key_stride = r.key_token_stride;
  block.out_stride = r.out_head_stride;
  block.scale = r.scale;
  block.query = r.query + (b * r.num_heads + head * block.group) * r.head_dim;
  if (r.out) block.out = r.out + b * r.out_batch_stride + head * block.group * r.out_head_stride + token;
  std::int64_t first = b * r.key_batch_stride + head * r.key_head_stride;
  if (r.key_type == KeyType::Int8) {
    block.row_scales = r.key_scales + b * r.scale_batch_stride + head * r.scale_head_stride;
  }
  if (r.rows) {
    block.list = r.rows + (b * r.num_kv_heads + head) * r.rows_stride + token;
  } else if (is_sketch(r.key_type)) {
    first += token / kSketchTokens * r.key_token_stride;
  } else {
    first += token * r.key_token_stride;
    if (block.row_scales) block.row_scales += token;
  }
  block.keys = static_cast<const char*>(r.keys) + first * element_bytes(r.key_type);
  *mean = r.key_mean ? r.key_mean + (b * r.num_kv_heads + head) * r.head_dim : nullptr;
  return block;
}

// The values of a chunk; what attend_part() does not set.
WeighBlock ScanWorker::values_of(const Job& job, const Chunk& chunk) {
  const ScanRequest& r = job.request;
  WeighBlock block{};
  const std::int64_t first = chunk.sequence * r.value_batch_stride + chunk.head * r.value_head_stride +
                             chunk.token * r.value_token_stride;
  block.values = static_cast<const char*>(r.values) + first * element_bytes(r.value_type);
  block.rows = chunk.rows;
  block.value_stride = r.value_token_stride;
  block.group = r.num_heads / r.num_kv_heads;
  block.head_dim = r.head_dim;
  return block;
}

std::int64_t ScanWorker::scan_chunk(Job& job, std::int64_t number, std::int64_t next) const {
  const ScanRequest& r = job.request;
  const float *mean, *next_mean;
  const Chunk chunk = chunk_of(job, number);
  ScanBlock block = block_of(job, chunk, &mean);
  if (next < job.chunks && !block.list) block.next = block_of(job, chunk_of(job, next), &next_mean).keys;
  if (r.key_type == KeyType::Int8 || is_sketch(r.key_type)) {
    thread_local std::vector<float> shifts;
    shifts.resize(static_cast<std::size_t>(block.group));
    shift_heads(block.query, mean, r.head_dim, shifts);
    block.shifts = shifts.data();
  }
  if (r.values) {
    attend_chunk(job, number, chunk, block);
    return kv_bytes(r, chunk.rows);
  }
  if (r.halves) {
    scan_for_link(job, chunk, block);
  } else {
    isa_.scan[static_cast<int>(r.key_type)](block);
  }
  return bytes_of(r, block);
}

// So few tokens at a time that their logits stay in the nearest cache until they have been made smaller.
void ScanWorker::scan_for_link(const Job& job, const Chunk& chunk, ScanBlock block) const {
  const ScanRequest& r = job.request;
  constexpr std::size_t kLine = 64;
  thread_local std::vector<float> memory;
  memory.resize(static_cast<std::size_t>(block.group * kLinkTokens) + kLine / sizeof(float));
  const auto begin = reinterpret_cast<std::uintptr_t>(memory.data());
  block.out = reinterpret_cast<float*>((begin + kLine - 1) / kLine * kLine);
  block.out_stride = kLinkTokens;
  const void* const after_chunk = block.next;
  const std::int64_t first_head = chunk.head * block.group, last = chunk.token + chunk.rows;
  for (std::int64_t token = chunk.token; token < last; token += kLinkTokens) {
    block.rows = std::min(kLinkTokens, last - token);
    const std::int64_t steps = is_sketch(r.key_type) ? block.rows / kSketchTokens : block.rows;
    const auto* next = static_cast<const char*>(block.keys) + steps * block.key_stride * element_bytes(r.key_type);
    block.next = block.list ? nullptr : token + kLinkTokens < last ? next : after_chunk;
    isa_.scan[static_cast<int>(r.key_type)](block);
    for (std::int64_t g = 0; g < block.group; ++g) {
      const std::int64_t head = first_head + g;
      std::uint16_t* out = r.halves + chunk.sequence * r.out_batch_stride + head * r.out_head_stride + token;
      float* top = r.maxima + (chunk.sequence * r.num_heads + head) * r.maxima_stride + token / kLinkTokens;
      *top = isa_.shrink(block.out + g * kLinkTokens, block.rows, out);
    }
    if (block.list) {
      block.list += block.rows;
    } else {
      block.keys = next;
      if (block.row_scales) block.row_scales += block.rows;
    }
  }
  isa_.finish_shrinking();
}

void ScanWorker::attend_chunk(Job& job, std::int64_t number, const Chunk& chunk, ScanBlock keys) const {
  const ScanRequest& r = job.request;
  WeighBlock values = values_of(job, chunk);
  values.next = keys.next;
  attend_part(isa_, r.key_type, keys, r.value_type, values, job.parts, number);
  const std::int64_t head = chunk.sequence * r.num_kv_heads + chunk.head;
  if (job.unfinished[static_cast<std::size_t>(head)].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  const std::int64_t first = head * values.group;
  merge_parts(isa_, job.parts, chunk.first_of_head, chunk.count, r.context + first * r.head_dim, r.log_sum + first);
}

void ScanWorker::thread_loop() {
#if defined(__linux__)
  prctl(PR_SET_TIMERSLACK, 1000UL);  // nanoseconds: by default a nap is 50 us longer than asked for
#endif
  Lock lock(mutex_);
  while (!closing_) {
    if (Job* job = first_ready()) {
      work_on(*job, lock);
      continue;
    }
    const std::uint64_t seen = started_;
    if (!watched_.empty()) {
      const std::uint32_t* word = watched_.front()->start_word;
      const std::uint32_t turn = watched_.front()->turn;
      lock.unlock();
      look_at(word, turn, seen);
      lock_soon(lock);
      start_watched();
      continue;
    }
    lock.unlock();
    spin([&] { return started_ != seen || closing_; });
    lock_soon(lock);
    work_cv_.wait(lock, [&] { return closing_ || first_ready() || !watched_.empty(); });
  }
}

bool ScanWorker::done(JobId id) {
  check_process();
  Lock lock(mutex_);
  const Job& job = find(id);
  if (job.state == State::Done) return true;
  if (closing_) throw std::runtime_error("this ScanWorker was closed before job " + std::to_string(id) + " was done");
  return false;
}

std::optional<ScanWorker::Span> ScanWorker::wait(JobId id, bool help, Clock::duration timeout) {
  check_process();
  Lock lock(mutex_);
  Job& job = find(id);
  if (job.waited_for) throw std::invalid_argument("job=" + std::to_string(id) + ": another thread waits for it");
  job.waited_for = true;

  // By the wall clock, because ThreadSanitizer of GCC 12 does not know the steady clock's wait. Callers only poll.
  const auto until = std::chrono::system_clock::now() + timeout;
  help = help || num_threads_ == 0;
  if (help) {
    wait_cv_.wait_until(lock, until, [&] { return closing_ || job.state != State::Held; });
    if (!closing_ && job.state == State::Ready && !job.exhausted()) work_on(job, lock);
  }
  if (job.state == State::Ready && !closing_) {  // the others are in their last chunks
    lock.unlock();
    spin([&] { return job.state == State::Done || closing_; });
    lock_soon(lock);
  }
  wait_cv_.wait_until(lock, until, [&] { return closing_ || job.state == State::Done; });

  job.waited_for = false;
  if (job.state == State::Done) {
    const Span span = job.span;
    release(job);
    return span;
  }
  if (closing_) throw std::runtime_error("this ScanWorker was closed before job " + std::to_string(id) + " was done");
  return std::nullopt;
}

// ---- The end --------------------------------------------------------------------------------------------------------

void ScanWorker::close() {
  if (getpid() != process_) return;
  {
    Lock lock(mutex_);
    closing_ = true;
    work_cv_.notify_all();
    wait_cv_.notify_all();
  }
  {
    Lock lock(join_mutex_);  // of two closers, the second waits for the first
    for (std::thread& thread : threads_) {
      if (thread.joinable()) thread.join();
    }
  }
  Lock lock(mutex_);
  wait_cv_.wait(lock, [&] { return active_ == 0; });  // helpers
  watched_.clear();
  for (const auto& job : slots_) {
    // A stream that waits for one would wait for ever. Forward only: several jobs may share a word. And once: after the
    // first close() the words may be gone.
    if (job->done_word && job->state != State::Done && !has_reached(job->done_word, job->turn)) {
      __atomic_store_n(job->done_word, job->turn, __ATOMIC_RELEASE);
    }
    job->done_word = nullptr;
  }
}

bool ScanWorker::may_be_deleted() {
  if (getpid() != process_) return false;
  Lock lock(mutex_);
  return pending_calls_ == 0;
}

}  // namespace hybridgen
