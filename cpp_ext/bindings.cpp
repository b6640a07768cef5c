// The Python module hybridgen._C. The only file that knows pybind11.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "attention.h"
#include "dispatch.h"
#include "host_memory.h"
#include "read_ceiling.h"
#include "scan_worker.h"

namespace py = pybind11;
using hybridgen::AttendRequest;
using hybridgen::ChooseRequest;
using hybridgen::HostMapping;
using hybridgen::KeyType;
using hybridgen::ScanRequest;
using hybridgen::ScanWorker;

namespace {

// Closed before the interpreter goes: their threads read memory that belongs to Python. Guarded by the GIL. Leaked, so
// that no static destructor runs under a worker that Python never collected.
std::set<ScanWorker*>& live_workers() {
  static auto* workers = new std::set<ScanWorker*>;
  return *workers;
}

// Releases the GIL for its lifetime, and counts (under the GIL) how many threads are in such a section. A daemon thread
// that wants the GIL back once the interpreter is gone is ended by Python in a way that aborts a C++ program.
class WithoutGil {
 public:
  WithoutGil() {
    ++inside;
    release_.emplace();
  }
  ~WithoutGil() {
    release_.reset();
    --inside;
  }
  static inline int inside = 0;

 private:
  std::optional<py::gil_scoped_release> release_;
};

struct CloseAndDelete {
  void operator()(ScanWorker* worker) const {
    live_workers().erase(worker);
    WithoutGil here;
    worker->close();
    if (worker->may_be_deleted()) delete worker;
  }
};
using WorkerHolder = std::unique_ptr<ScanWorker, CloseAndDelete>;

// At interpreter exit. Keeps the GIL while it closes, so that no other thread deletes a worker meanwhile; nothing that
// close() waits for needs it. Then lets the waiters, who have a RuntimeError now, come out.
void close_all() {
  for (ScanWorker* worker : live_workers()) worker->close();
  for (int ms = 0; WithoutGil::inside > 0 && ms < 2000; ++ms) {
    py::gil_scoped_release release;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Their order is KeyType's.
constexpr const char* kTypeNames[hybridgen::kKeyTypes] = {"float32", "float16", "bfloat16", "int8", "int4", "int2"};

// `types`: how many of them are allowed.
KeyType key_type_of(const std::string& name, const char* argument, int types) {
  std::string choices;
  for (int i = 0; i < types; ++i) {
    if (name == kTypeNames[i]) return static_cast<KeyType>(i);
    choices += (i == 0 ? "" : ", ") + std::string(kTypeNames[i]);
  }
  throw std::invalid_argument(argument + ("='" + name) + "': must be one of " + choices);
}

WorkerHolder make_worker(int threads, const std::vector<int>& cores, const std::string& isa) {
  WorkerHolder worker(new ScanWorker(threads, cores, isa));
  live_workers().insert(worker.get());
  return worker;
}

std::int64_t submit(ScanWorker& worker, std::uintptr_t query, std::uintptr_t keys, std::uintptr_t out,
                    const std::string& key_type, std::int64_t num_heads, std::int64_t num_kv_heads,
                    std::int64_t head_dim, std::vector<std::int64_t> lengths,
                    std::tuple<std::int64_t, std::int64_t, std::int64_t> key_strides,
                    std::tuple<std::int64_t, std::int64_t> out_strides, float scale, bool hold, std::uintptr_t rows,
                    std::int64_t rows_stride, std::uintptr_t key_scales,
                    std::tuple<std::int64_t, std::int64_t> scale_strides, std::uintptr_t key_mean,
                    std::uintptr_t maxima, std::int64_t maxima_stride) {
  ScanRequest request;
  request.query = reinterpret_cast<const float*>(query);
  request.keys = reinterpret_cast<const void*>(keys);
  if (maxima) {
    request.halves = reinterpret_cast<std::uint16_t*>(out);
    request.maxima = reinterpret_cast<float*>(maxima);
    request.maxima_stride = maxima_stride;
  } else {
    request.out = reinterpret_cast<float*>(out);
  }
  request.key_type = key_type_of(key_type, "key_type", hybridgen::kKeyTypes);
  request.num_heads = num_heads;
  request.num_kv_heads = num_kv_heads;
  request.head_dim = head_dim;
  request.lengths = std::move(lengths);
  std::tie(request.key_batch_stride, request.key_head_stride, request.key_token_stride) = key_strides;
  std::tie(request.out_batch_stride, request.out_head_stride) = out_strides;
  request.scale = scale;
  request.rows = reinterpret_cast<const std::int32_t*>(rows);
  request.rows_stride = rows_stride;
  request.key_scales = reinterpret_cast<const float*>(key_scales);
  std::tie(request.scale_batch_stride, request.scale_head_stride) = scale_strides;
  request.key_mean = reinterpret_cast<const float*>(key_mean);
  return worker.submit(std::move(request), hold);
}

std::int64_t submit_attention(ScanWorker& worker, std::uintptr_t query, std::uintptr_t keys, std::uintptr_t values,
                              std::uintptr_t context, std::uintptr_t log_sum, const std::string& key_type,
                              const std::string& value_type, std::int64_t num_heads, std::int64_t num_kv_heads,
                              std::int64_t head_dim, std::vector<std::int64_t> lengths,
                              std::tuple<std::int64_t, std::int64_t, std::int64_t> key_strides,
                              std::tuple<std::int64_t, std::int64_t, std::int64_t> value_strides, float scale,
                              bool hold, std::uintptr_t key_scales,
                              std::tuple<std::int64_t, std::int64_t> scale_strides, std::uintptr_t key_mean) {
  ScanRequest request;
  request.query = reinterpret_cast<const float*>(query);
  request.keys = reinterpret_cast<const void*>(keys);
  request.values = reinterpret_cast<const void*>(values);
  request.context = reinterpret_cast<float*>(context);
  request.log_sum = reinterpret_cast<float*>(log_sum);
  request.key_type = key_type_of(key_type, "key_type", hybridgen::kRowTypes);
  request.value_type = key_type_of(value_type, "value_type", hybridgen::kValueTypes);
  request.num_heads = num_heads;
  request.num_kv_heads = num_kv_heads;
  request.head_dim = head_dim;
  request.lengths = std::move(lengths);
  std::tie(request.key_batch_stride, request.key_head_stride, request.key_token_stride) = key_strides;
  std::tie(request.value_batch_stride, request.value_head_stride, request.value_token_stride) = value_strides;
  request.scale = scale;
  request.key_scales = reinterpret_cast<const float*>(key_scales);
  std::tie(request.scale_batch_stride, request.scale_head_stride) = scale_strides;
  request.key_mean = reinterpret_cast<const float*>(key_mean);
  if (!request.values) throw std::invalid_argument("values=0: must be a non-null address");
  return worker.submit(std::move(request), hold);
}

// Tensors as tuples: an address, for keys and values the type, strides in elements.
using HeadsArgument = std::tuple<std::uintptr_t, std::int64_t, std::int64_t>;
using KvArgument = std::tuple<std::uintptr_t, std::string, std::int64_t, std::int64_t, std::int64_t>;
using EmptyArgument = std::tuple<std::uintptr_t, std::int64_t>;
using ShapeArgument = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

template <class T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

hybridgen::HeadRows heads_of(const HeadsArgument& from) {
  return {pointer<const float>(std::get<0>(from)), std::get<1>(from), std::get<2>(from)};
}

hybridgen::KvRows kv_of(const KvArgument& from, const char* argument) {
  return {pointer<const void>(std::get<0>(from)), key_type_of(std::get<1>(from), argument, hybridgen::kValueTypes),
          std::get<2>(from), std::get<3>(from), std::get<4>(from)};
}

hybridgen::EmptySlots empty_of(const EmptyArgument& from) {
  return {pointer<const bool>(std::get<0>(from)), std::get<1>(from)};
}

hybridgen::AttentionShape shape_of(const ShapeArgument& from) {
  hybridgen::AttentionShape s;
  std::tie(s.batch, s.num_heads, s.num_kv_heads, s.head_dim, s.device_rows, s.host_rows) = from;
  return s;
}

std::int64_t choose(const ShapeArgument& shape, const HeadsArgument& query, const KvArgument& keys,
                    const EmptyArgument& empty, const HeadsArgument& host_logits, float scale,
                    std::vector<std::int64_t> scored, std::vector<std::int64_t> least, std::vector<std::int64_t> most,
                    double mass, std::int64_t extra_thousandths, std::uintptr_t rows, std::uintptr_t padding,
                    std::uintptr_t counts, std::uintptr_t masses, std::uintptr_t probabilities,
                    const std::string& isa) {
  ChooseRequest request;
  request.shape = shape_of(shape);
  request.query = heads_of(query);
  request.keys = kv_of(keys, "keys");
  request.empty = empty_of(empty);
  request.host_logits = heads_of(host_logits);
  request.scale = scale;
  request.scored = std::move(scored);
  request.least = std::move(least);
  request.most = std::move(most);
  request.mass = mass;
  request.extra_thousandths = extra_thousandths;
  request.rows = pointer<std::int64_t>(rows);
  request.padding = pointer<bool>(padding);
  request.counts = pointer<std::int64_t>(counts);
  request.masses = pointer<float>(masses);
  request.probabilities = pointer<float>(probabilities);
  const auto& kernels = hybridgen::select_isa(isa);
  WithoutGil here;
  return hybridgen::choose(request, kernels);
}

void attend(const ShapeArgument& shape, const HeadsArgument& query, const KvArgument& keys, const KvArgument& values,
            const EmptyArgument& empty, const KvArgument& host_keys, const KvArgument& host_values, std::int64_t kept,
            std::uintptr_t rows, std::uintptr_t counts, float scale, std::uintptr_t context, std::uintptr_t log_sum,
            const std::string& isa) {
  AttendRequest request;
  request.shape = shape_of(shape);
  request.query = heads_of(query);
  request.keys = kv_of(keys, "keys");
  request.values = kv_of(values, "values");
  request.empty = empty_of(empty);
  request.host_keys = kv_of(host_keys, "host_keys");
  request.host_values = kv_of(host_values, "host_values");
  request.kept = kept;
  request.rows = pointer<const std::int64_t>(rows);
  request.counts = pointer<const std::int64_t>(counts);
  request.scale = scale;
  request.context = pointer<float>(context);
  request.log_sum = pointer<float>(log_sum);
  const auto& kernels = hybridgen::select_isa(isa);
  WithoutGil here;
  hybridgen::attend(request, kernels);
}

double seconds(ScanWorker::Clock::time_point time) {
  return std::chrono::duration<double>(time.time_since_epoch()).count();
}

std::tuple<double, double, std::int64_t> wait_and_count(ScanWorker& worker, ScanWorker::JobId job, bool help) {
  for (;;) {
    {
      WithoutGil here;
      if (const auto span = worker.wait(job, help, std::chrono::milliseconds(100))) {
        return {seconds(span->start), seconds(span->end), span->read_bytes};
      }
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();  // Ctrl-C while a held job never starts
  }
}

// Memory nodes as tuples: id, CPUs, bytes, bytes available, distances.
using NodeTuple = std::tuple<int, std::vector<int>, std::int64_t, std::int64_t, std::map<int, int>>;

std::vector<NodeTuple> memory_nodes() {
  std::vector<NodeTuple> tuples;
  for (const auto& n : hybridgen::memory_nodes()) {
    tuples.emplace_back(n.id, n.cpus, n.memory_bytes, n.available_bytes, n.distances);
  }
  return tuples;
}

auto place_kv(const std::string& policy, const std::vector<NodeTuple>& tuples, const std::vector<int>& cpus,
              std::optional<int> near, std::optional<int> far) {
  std::vector<hybridgen::MemoryNode> nodes;
  for (const auto& [id, on, bytes, available, distances] : tuples) {
    nodes.push_back({id, on, bytes, available, distances});
  }
  const auto placed = hybridgen::place_kv(policy, nodes, cpus, near, far);
  return std::make_tuple(placed.keys, placed.values, placed.reason);
}

void to_os_error(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const hybridgen::SystemCallError& error) {
    PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code().value(), error.what()).ptr());
  }
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "hybridgen's CPU kernels: q . K over keys in host memory, on an own pool of threads. Addresses are integers.";

  m.def("isa_variants", [] {
    std::vector<std::string> names;
    for (const auto* isa : hybridgen::usable_isas()) names.emplace_back(isa->name);
    return names;
  }, "Names of the kernel variants that this CPU and OS run, best first; the last is 'scalar'.");

  m.def("selected_isa", [] { return std::string(hybridgen::select_isa().name); },
        "The variant that a new ScanWorker uses: the one that the environment variable HYBRIDGEN_CPU_ISA names,\n"
        "else the best. ValueError if it names one that is unknown or cannot run here.");

  m.def("choose", &choose, py::arg("shape"), py::arg("query"), py::arg("keys"), py::arg("empty"),
        py::arg("host_logits"), py::arg("scale"), py::arg("scored"), py::arg("least"), py::arg("most"),
        py::arg("mass"), py::arg("extra_thousandths"), py::arg("rows"), py::arg("padding"), py::arg("counts"),
        py::arg("masses"), py::arg("probabilities") = 0, py::arg("isa") = "",
        R"(Which host rows are kept; returns K, the most that one KV head keeps. One thread, the GIL released.

p is the mean over a KV head's query heads of each head's softmax over device rows (scored here) and host rows (all that
were scored). Of sequence b are kept, best first and of equal ones the lower row first,
min(scored[b], ceil(number * extra_thousandths / 1000)) rows. The number is most[b], or, where mass < 1,
min(max(n, least[b]), most[b]) with n the fewest rows that together with the device rows hold `mass` of p; where all
that were scored hold less, most[b].

shape: (batch, num_heads, num_kv_heads, head_dim, device_rows, host_rows).
query: (address, batch stride, head stride), fp32 [batch, num_heads, head_dim], channel stride 1; strides in elements.
keys: (address, type, batch, head, row stride), [batch, num_kv_heads, device_rows, head_dim], type as in submit().
empty: (address, batch stride), bool [batch, device_rows]: slots without a token; what they hold is not read.
host_logits: (address, batch, head stride), fp32 [batch, num_heads, host_rows]; of sequence b the first scored[b].
scored, least, most: one number for each sequence; least and most may be more than was scored.
rows (int64), padding (bool): addresses of room for [batch, num_kv_heads, the largest K that `most` gives];
    [batch, num_kv_heads, K], contiguous, is written. Rows beyond a head's count are 0, and padding is true there.
counts (int64), masses (fp32; what device rows and kept rows hold of p): addresses of [batch, num_kv_heads].
probabilities: 0, or address of fp32 [batch, num_kv_heads, host_rows], contiguous: p of every scored row, 0 beyond.
isa: kernel variant, for tests; empty: selected_isa().

ValueError: names the argument, its value and what is allowed.)");

  m.def("attend", &attend, py::arg("shape"), py::arg("query"), py::arg("keys"), py::arg("values"), py::arg("empty"),
        py::arg("host_keys"), py::arg("host_values"), py::arg("kept"), py::arg("rows"), py::arg("counts"),
        py::arg("scale"), py::arg("context"), py::arg("log_sum"), py::arg("isa") = "",
        R"(Attention with one softmax over device rows and chosen host rows. One thread, the GIL released.

shape, query, keys, empty, isa: see choose(). values, host_keys, host_values: like keys, the host's with host_rows rows.
kept: the width of rows; 0: the host is left out, its addresses are not used.
rows: address of int64 [batch, num_kv_heads, kept], counts: of int64 [batch, num_kv_heads]: how many of them count.
context: address of fp32 [batch, num_heads, head_dim]. log_sum: 0, or address of fp32 [batch, num_heads], which gets
    log sum exp(logit). Without any row a sequence gets 0 and -inf.

ValueError: names the argument, its value and what is allowed.)");

  py::class_<ScanWorker, WorkerHolder>(m, "ScanWorker", R"(Threads that compute attention logits from keys in host memory.

    logits[b, h, j] = scale * q[b, h, :] . K[b, h // (num_heads // num_kv_heads), j, :]    for j < lengths[b]

threads: size of the pool; with 0 a job is scanned by the thread that waits for it.
cores: thread i runs on cores[i % len(cores)] only; empty: wherever the creating thread may.
isa: kernel variant, for tests; empty: selected_isa().
ValueError: threads < 0, a core that this process may not use, an unknown isa.

Methods may be called from any thread. A worker does not survive a fork: in the child its methods raise RuntimeError
and close() does nothing. It is closed when it is collected and at interpreter exit.)")
      .def(py::init(&make_worker), py::arg("threads"), py::arg("cores") = std::vector<int>{}, py::arg("isa") = "")
      .def("submit", &submit, py::arg("query"), py::arg("keys"), py::arg("out"), py::arg("key_type"),
           py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("lengths"),
           py::arg("key_strides"), py::arg("out_strides"), py::arg("scale"), py::arg("hold") = false,
           py::arg("rows") = 0, py::arg("rows_stride") = 0, py::arg("key_scales") = 0,
           py::arg("scale_strides") = std::make_tuple(0, 0), py::arg("key_mean") = 0,
           py::arg("maxima") = 0, py::arg("maxima_stride") = 0,
           R"(Queues a scan and returns its job id; does not block.

query: address of fp32 [batch, num_heads, head_dim], contiguous; read while the job runs.
keys: address of [batch, num_kv_heads, tokens, head_dim] of key_type, channel stride 1.
out: address of fp32 [batch, num_heads, tokens], token stride 1; only out[b, :, :lengths[b]] is written.
    Of a sketch, uint8 [batch, num_kv_heads, blocks, bytes]: whole blocks of 64 tokens, byte stride 1.
key_type: 'float32', 'float16', 'bfloat16' or 'int8': products and sums are fp32. 'int4', 'int2': a sketch, as
    hybridgen/kv_cache/quantize.py makes it; the query is rounded to int8 for each block, sums are of integers.
head_dim: a multiple of 8, for sketches at most 1024. num_heads: a multiple of num_kv_heads.
lengths: tokens to scan, one for each sequence (their number is the batch size).
key_strides: (batch, head, token), out_strides: (batch, head), both in elements; a sketch's (batch, head, block), bytes.
hold: the job starts when start(), or the function of start_call(), is called for it.
rows: 0, or address of int32 [batch, num_kv_heads, rows_stride], contiguous; read while the job runs, and not checked.
    Then lengths[b] counts listed rows, and logits[b, h, j] is that of the key in row rows[b, kv head, j]. Any order and
    repeats are allowed; of a sketch each block is read once only if the rows of a list are sorted.
key_scales: for int8 and only then, address of fp32 [batch, num_kv_heads, tokens], token stride 1.
scale_strides: its (batch, head), in elements.
key_mean: 0, or, for int8 and sketches, address of fp32 [batch, num_kv_heads, head_dim], contiguous: what was taken off
    the keys; its part is added to the logits.
maxima: 0, or address of fp32 [batch, num_heads, maxima_stride], contiguous. Then out is of fp16, and the logit of token t
    is out[b, h, t] + maxima[b, h, t // 256]: contracts.md, "Logits over the link".

Jobs are scanned in the order in which they start. The memory must stay alive and unchanged until wait() has returned.
ValueError: names the argument, its value and what is allowed. RuntimeError: closed.)")
      .def("submit_attention", &submit_attention, py::arg("query"), py::arg("keys"), py::arg("values"),
           py::arg("context"), py::arg("log_sum"), py::arg("key_type"), py::arg("value_type"), py::arg("num_heads"),
           py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("lengths"), py::arg("key_strides"),
           py::arg("value_strides"), py::arg("scale"), py::arg("hold") = false, py::arg("key_scales") = 0,
           py::arg("scale_strides") = std::make_tuple(0, 0), py::arg("key_mean") = 0,
           R"(Queues attention over all of the tokens and returns its job id; does not block. As submit(), but:

key_type: 'float32', 'float16', 'bfloat16' or 'int8'.
values: address of [batch, num_kv_heads, tokens, head_dim] of value_type ('float32', 'float16' or 'bfloat16'), channel
    stride 1; value_strides: (batch, head, token), in elements.
context: address of fp32 [batch, num_heads, head_dim]; log_sum: of fp32 [batch, num_heads], which gets
    log sum exp(logit). Both contiguous; a sequence of length 0 gets 0 and -inf.

Each thread does a softmax of its own over the tokens that it takes; they are merged by their sums.)")
      .def("start", &ScanWorker::start, py::arg("job"),
           "Starts a held job. ValueError: unknown, not held, or started already. RuntimeError: closed.")
      .def("watch", [](ScanWorker& worker, ScanWorker::JobId job, std::uintptr_t start, std::uintptr_t done,
                       std::uint32_t turn) {
             worker.watch(job, reinterpret_cast<const std::uint32_t*>(start), reinterpret_cast<std::uint32_t*>(done),
                          turn);
           },
           py::arg("job"), py::arg("start"), py::arg("done"), py::arg("turn"),
           R"(Has a held job start when the uint32 at address `start` reaches `turn`, which is written to the one at `done`
when the job is done, or the worker closed. Both stay alive until then. Jobs are looked at in the order in which they are given
here; idle threads watch without parking. ValueError: a worker without threads, a job that something starts already.)")
      .def("start_call", [](ScanWorker& worker, ScanWorker::JobId job) {
             const auto call = worker.start_call(job);
             return std::make_pair(reinterpret_cast<std::uintptr_t>(call.function),
                                   reinterpret_cast<std::uintptr_t>(call.data));
           }, py::arg("job"),
           R"((function, data): addresses of a C function `void function(void *)` and of its argument.

One call, from any thread, starts the held job. It takes a lock for nanoseconds, wakes at most one pool thread and never
touches Python, as CUDA's cuLaunchHostFunc asks. A call after the wait, after close() or a second one does nothing.
ValueError: unknown job, not held, or its start call was asked for before. RuntimeError: closed.)")
      .def("done", &ScanWorker::done, py::arg("job"),
           "Whether the job's logits are all written. ValueError: unknown or already waited for.\n"
           "RuntimeError: closed before the job was done.")
      .def("wait", [](ScanWorker& worker, ScanWorker::JobId job, bool help) {
             const auto [start, end, bytes] = wait_and_count(worker, job, help);
             return std::make_pair(start, end);
           }, py::arg("job"), py::arg("help") = true,
           R"(Blocks, with the GIL released, until the job is done; returns (start_s, end_s) of its scan.

The times are seconds on time.perf_counter's clock: when the first chunk began and when the last one ended. With help the
calling thread scans chunks of this job, too (always if threads is 0). Waits for a held job until it is started.
ValueError: unknown or already waited for. RuntimeError: the worker was closed before the job was done.)")
      .def("wait_and_count", &wait_and_count, py::arg("job"), py::arg("help") = true,
           R"(wait(), and the bytes that the scan read: (start_s, end_s, read_bytes).

Bytes of keys (of attention, of values too) and what belongs to them: int8's row scales; of a sketch the whole blocks that hold any of the rows, once
for each run of such rows in a list. Means are not counted: they are read once and stay in the cache.)")
      .def("close", &ScanWorker::close, py::call_guard<WithoutGil>(),
           "Ends the threads after the chunks that they are in. Jobs that are not done are abandoned, and whoever waits\n"
           "for one gets a RuntimeError. After it returns no buffer is touched any more. May be repeated.")
      .def_property_readonly("threads", &ScanWorker::threads, "Size of the pool.")
      .def_property_readonly("isa", [](const ScanWorker& worker) { return std::string(worker.isa().name); },
                             "Name of the kernel variant that this worker runs.")
      .def_property_readonly("jobs_by_isa", [](const ScanWorker& worker) {
             py::dict counts;
             for (const auto* isa : hybridgen::usable_isas()) {
               counts[isa->name] = isa == &worker.isa() ? worker.jobs_done() : 0;
             }
             return counts;
           }, "Finished jobs for each variant of isa_variants().");

  py::register_exception_translator(&to_os_error);
  m.def("memory_nodes", &memory_nodes, "The nodes as (id, cpus, memory_bytes, available_bytes, distances to others).");
  m.def("allowed_cpus", &hybridgen::allowed_cpus, "The CPUs that this process may run on.");
  m.def("place_kv", &place_kv, py::arg("policy"), py::arg("nodes"), py::arg("cpus"), py::arg("near") = py::none(),
        py::arg("far") = py::none(),
        "(nodes of the keys, nodes of the values, why they are not apart, or ''): see host_memory.h.\n"
        "ValueError: an unknown policy, a node that is not there or has no memory.");

  py::class_<HostMapping>(m, "HostMapping", py::buffer_protocol(),
                          "Anonymous memory, a writable buffer; see host_memory.h. OSError names the call refused.")
      .def(py::init<std::size_t, bool>(), py::arg("size_bytes"), py::arg("reserve") = false)
      .def_buffer([](HostMapping& h) {
        return py::buffer_info(reinterpret_cast<std::uint8_t*>(h.data()), static_cast<py::ssize_t>(h.bytes()));
      })
      .def_property_readonly("huge_pages", &HostMapping::huge_pages, "Whether the system has huge pages for it.")
      .def("huge_page_bytes", &HostMapping::huge_page_bytes, "How much lies on huge pages now, at most.")
      .def("bind", &HostMapping::bind, py::arg("nodes"), "Where pages that do not exist yet will lie.")
      .def("touch", &HostMapping::touch, py::arg("offset"), py::arg("size_bytes"), py::arg("node"),
           py::call_guard<WithoutGil>(),
           "Makes pages exist, from CPUs of `node` or near it; returns the node where it ran, or -1.")
      .def("page_nodes", &HostMapping::page_nodes, py::arg("offset"), py::arg("size_bytes"), py::arg("stride"),
           py::call_guard<WithoutGil>(),
           "The node of every page at offset, offset + stride, ...; negative: no page yet.");

  m.def("read_seconds", [](std::uintptr_t data, std::size_t bytes, int passes, const std::vector<int>& cores,
                           int streams, std::size_t ahead_bytes, std::size_t chunk_bytes) {
          std::size_t walked = 0;
          WithoutGil here;
          const double s = hybridgen::read_seconds(pointer<const void>(data), bytes, passes, cores,
                                                   {streams, ahead_bytes, chunk_bytes}, &walked);
          return std::make_pair(s, walked);
        }, py::arg("data"), py::arg("bytes"), py::arg("passes"), py::arg("cores"), py::arg("streams") = 1,
        py::arg("ahead_bytes") = 0, py::arg("chunk_bytes") = 256 << 10,
        "(seconds, bytes walked) of a loop that only loads memory, a thread on each core: see read_ceiling.h.");

  py::module_::import("atexit").attr("register")(py::cpp_function(close_all));
}
