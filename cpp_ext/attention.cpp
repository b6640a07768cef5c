#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>

namespace hybridgen {
namespace {

constexpr std::int64_t kLine = 16;  // floats of a cache line
constexpr std::int64_t kMostRows = std::numeric_limits<std::int32_t>::max();  // kernels take lists of int32

void require(bool good, const std::string& argument, std::int64_t value, const char* allowed) {
  if (!good) throw std::invalid_argument(argument + "=" + std::to_string(value) + ": must be " + allowed);
}

void check_address(const char* argument, const void* address, std::int64_t alignment, bool needed) {
  const auto value = reinterpret_cast<std::uintptr_t>(address);
  if ((!address && needed) || value % static_cast<std::uintptr_t>(alignment) != 0) {
    throw std::invalid_argument(std::string(argument) + "=" + std::to_string(value) +
                                ": must be a non-null address, a multiple of " + std::to_string(alignment));
  }
}

void check_shape(const AttentionShape& s, float scale) {
  require(s.batch > 0, "batch", s.batch, "positive");
  require(s.num_kv_heads > 0, "num_kv_heads", s.num_kv_heads, "positive");
  require(s.num_heads > 0 && s.num_heads % s.num_kv_heads == 0, "num_heads", s.num_heads,
          "a positive multiple of num_kv_heads");
  require(s.head_dim > 0 && s.head_dim % 8 == 0, "head_dim", s.head_dim, "a positive multiple of 8");
  require(s.device_rows >= 0 && s.device_rows <= kMostRows, "device_rows", s.device_rows, "between 0 and 2^31 - 1");
  require(s.host_rows >= 0 && s.host_rows <= kMostRows, "host_rows", s.host_rows, "between 0 and 2^31 - 1");
  if (!std::isfinite(scale)) throw std::invalid_argument("scale=" + std::to_string(scale) + ": must be finite");
}

// The stride of a dimension of size 1 means nothing.
void check_rows(const char* argument, const KvRows& rows, const AttentionShape& s, std::int64_t count) {
  check_address(argument, rows.data, rows.type == KeyType::Float32 ? 4 : 2, count > 0);
  const bool good = (s.batch == 1 || rows.batch_stride >= 0) && (s.num_kv_heads == 1 || rows.head_stride >= 0) &&
                    (count < 2 || rows.row_stride >= s.head_dim);
  if (!good) {
    throw std::invalid_argument(std::string(argument) +
                                ": strides (batch, head, row) must be 0 or more, that of rows head_dim or more");
  }
}

void check_heads(const char* argument, const HeadRows& heads, const AttentionShape& s, bool needed) {
  check_address(argument, heads.data, 4, needed);
  const bool good = (s.batch == 1 || heads.batch_stride >= 0) && (s.num_heads == 1 || heads.head_stride >= 0);
  if (!good) throw std::invalid_argument(std::string(argument) + ": strides (batch, head) must be 0 or more");
}

void check_empty(const EmptySlots& empty, const AttentionShape& s) {
  check_address("empty", empty.data, 1, s.device_rows > 0);
  require(s.batch == 1 || empty.batch_stride >= 0, "empty: stride", empty.batch_stride, "0 or more");
}

// K of sequence b, where n rows are enough to hold the mass.
std::int64_t kept(const ChooseRequest& r, std::size_t b, std::int64_t n) {
  const std::int64_t number = std::min(std::max(n, r.least[b]), r.most[b]);
  return std::min(r.scored[b], (number * r.extra_thousandths + 999) / 1000);
}

// The largest K there can be.
std::int64_t widest_of(const ChooseRequest& r) {
  std::int64_t widest = 0;
  for (std::size_t b = 0; b < r.most.size(); ++b) widest = std::max(widest, kept(r, b, r.most[b]));
  return widest;
}

void check(const ChooseRequest& r) {
  const AttentionShape& s = r.shape;
  check_shape(s, r.scale);
  const auto batch = static_cast<std::size_t>(s.batch);
  const auto one_each = [batch](const char* name, const std::vector<std::int64_t>& values) {
    require(values.size() == batch, name, static_cast<std::int64_t>(values.size()), "one number for each sequence");
  };
  one_each("len(scored)", r.scored);
  one_each("len(least)", r.least);
  one_each("len(most)", r.most);
  for (std::size_t b = 0; b < batch; ++b) {
    const auto limited = [b](const char* name, std::int64_t value, std::int64_t limit, const char* allowed) {
      require(value >= 0 && value <= limit, name + ("[" + std::to_string(b) + "]"), value, allowed);
    };
    limited("scored", r.scored[b], s.host_rows, "between 0 and the host logits' width");
    limited("least", r.least[b], kMostRows, "between 0 and 2^31 - 1");
    limited("most", r.most[b], kMostRows, "between 0 and 2^31 - 1");
  }
  if (std::isnan(r.mass)) throw std::invalid_argument("mass=nan: must be a number");
  require(r.extra_thousandths >= 1000 && r.extra_thousandths <= kMostRows, "extra_thousandths", r.extra_thousandths,
          "between 1000 and 2^31 - 1");
  const bool any = widest_of(r) > 0;
  check_heads("query", r.query, s, true);
  check_rows("keys", r.keys, s, s.device_rows);
  check_empty(r.empty, s);
  check_heads("host_logits", r.host_logits, s, *std::max_element(r.scored.begin(), r.scored.end()) > 0);
  check_address("rows", r.rows, 8, any);
  check_address("padding", r.padding, 1, any);
  check_address("counts", r.counts, 8, true);
  check_address("masses", r.masses, 4, true);
  check_address("probabilities", r.probabilities, 4, false);
}

void check(const AttendRequest& r) {
  const AttentionShape& s = r.shape;
  check_shape(s, r.scale);
  check_heads("query", r.query, s, true);
  check_rows("keys", r.keys, s, s.device_rows);
  check_rows("values", r.values, s, s.device_rows);
  check_empty(r.empty, s);
  check_address("context", r.context, 4, true);
  check_address("log_sum", r.log_sum, 4, false);
  require(r.kept >= 0, "kept", r.kept, "0 or more");
  if (r.kept == 0) return;
  check_rows("host_keys", r.host_keys, s, s.host_rows);
  check_rows("host_values", r.host_values, s, s.host_rows);
  check_address("rows", r.rows, 8, true);
  check_address("counts", r.counts, 8, true);
  for (std::int64_t i = 0; i < s.batch * s.num_kv_heads; ++i) {
    require(r.counts[i] >= 0 && r.counts[i] <= r.kept, "counts", r.counts[i], "between 0 and the width of rows");
    const std::int64_t* rows = r.rows + i * r.kept;
    bool good = true;
    for (std::int64_t k = 0; k < r.counts[i]; ++k) {
      good &= static_cast<std::uint64_t>(rows[k]) < static_cast<std::uint64_t>(s.host_rows);
    }
    if (!good) {
      throw std::invalid_argument("rows: each kept row must be between 0 and " + std::to_string(s.host_rows - 1));
    }
  }
}

// Memory that only grows, so that in steady state nothing is allocated. What it holds does not survive get().
template <class T>
class Scratch {
 public:
  T* get(std::int64_t n) {
    if (n > size_) {
      memory_ = nullptr;
      size_ = 0;
      memory_.reset(new T[static_cast<std::size_t>(n + n / 2)]);
      size_ = n + n / 2;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<T[]> memory_;
  std::int64_t size_ = 0;
};

// How many rows have a p of about the same size, and their sum.
struct Bin {
  double mass;
  std::int64_t count;
};

struct ThreadScratch {
  Scratch<float> query, local, logits, p, factors;
  Scratch<std::int32_t> slots, rows;
  Scratch<std::uint64_t> keys, sorted;
  Scratch<Bin> bins;
};

ThreadScratch& thread_scratch() {
  static thread_local ThreadScratch scratch;
  return scratch;
}

// The slots of sequence b that hold a token; returns how many.
std::int64_t list_slots(const EmptySlots& empty, std::int64_t b, std::int64_t device_rows, std::int32_t* slots) {
  const bool* row = empty.data + b * empty.batch_stride;
  std::int64_t n = 0;
  for (std::int64_t slot = 0; slot < device_rows; ++slot) {
    slots[n] = static_cast<std::int32_t>(slot);
    n += !row[slot];
  }
  return n;
}

template <class T>
const T* at(const T* base, std::int64_t offset) {
  return base ? base + offset : nullptr;
}

const void* head_of(const KvRows& rows, std::int64_t b, std::int64_t h) {
  const std::int64_t bytes = rows.type == KeyType::Float32 ? 4 : 2;
  return at(static_cast<const char*>(rows.data), bytes * (b * rows.batch_stride + h * rows.head_stride));
}

// The queries of KV head h's group, side by side.
const float* gather_query(const HeadRows& query, const AttentionShape& s, std::int64_t b, std::int64_t h, float* to) {
  const std::int64_t group = s.num_heads / s.num_kv_heads;
  for (std::int64_t g = 0; g < group; ++g) {
    const float* from = query.data + b * query.batch_stride + (h * group + g) * query.head_stride;
    std::memcpy(to + g * s.head_dim, from, sizeof(float) * static_cast<std::size_t>(s.head_dim));
  }
  return to;
}

void score(const IsaKernels& isa, const AttentionShape& s, const KvRows& keys, std::int64_t b, std::int64_t h,
           const std::int32_t* list, std::int64_t rows, const float* query, float scale, float* out,
           std::int64_t out_stride) {
  ScanBlock block{};
  block.query = query;
  block.keys = head_of(keys, b, h);
  block.out = out;
  block.rows = rows;
  block.key_stride = keys.row_stride;
  block.out_stride = out_stride;
  block.group = s.num_heads / s.num_kv_heads;
  block.head_dim = s.head_dim;
  block.scale = scale;
  block.list = list;
  isa.scan[static_cast<int>(keys.type)](block);
}

void weigh(const IsaKernels& isa, const AttentionShape& s, const KvRows& values, std::int64_t b, std::int64_t h,
           const std::int32_t* list, std::int64_t rows, const float* weights, std::int64_t weight_stride, float* out) {
  WeighBlock block{};
  block.weights = weights;
  block.values = head_of(values, b, h);
  block.list = list;
  block.out = out;
  block.rows = rows;
  block.value_stride = values.row_stride;
  block.weight_stride = weight_stride;
  block.group = s.num_heads / s.num_kv_heads;
  block.head_dim = s.head_dim;
  isa.weigh[static_cast<int>(values.type)](block);
}

std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// A key that sorts best first: the complement of p's bits (a float >= 0 orders like them) above the row.
std::uint64_t key_of(float p, std::int64_t row) {
  return std::uint64_t{~bits_of(p)} << 32 | static_cast<std::uint64_t>(row);
}

float p_of(std::uint64_t key) {
  const std::uint32_t bits = ~static_cast<std::uint32_t>(key >> 32);
  float p;
  std::memcpy(&p, &bits, sizeof p);
  return p;
}

// Sorts by p; stable, so that rows in order stay in order where p is equal. Radix sort, a byte a pass. Returns the
// array, of the two, that holds the result.
std::uint64_t* sort_keys(std::uint64_t* keys, std::uint64_t* other, std::int64_t n) {
  constexpr int kPasses = 4, kBins = 256;
  std::uint32_t begin[kPasses][kBins] = {};
  for (std::int64_t i = 0; i < n; ++i) {
    for (int pass = 0; pass < kPasses; ++pass) ++begin[pass][keys[i] >> (32 + 8 * pass) & 0xff];
  }
  for (int pass = 0; pass < kPasses; ++pass) {
    std::uint32_t* to = begin[pass];
    const int shift = 32 + 8 * pass;
    if (n == 0 || to[keys[0] >> shift & 0xff] == n) continue;  // all alike
    std::uint32_t sum = 0;
    for (int bin = 0; bin < kBins; ++bin) {
      const std::uint32_t count = to[bin];
      to[bin] = sum;
      sum += count;
    }
    for (std::int64_t i = 0; i < n; ++i) other[to[keys[i] >> shift & 0xff]++] = keys[i];
    std::swap(keys, other);
  }
  return keys;
}

struct Best {
  const std::uint64_t* keys;
  std::int64_t n;
};

// The rows of the highest p in order, as keys, at least as many as are kept: kept_of(n) where n are the fewest that hold
// more than `enough` of p, kept_of(length) where all do not.
template <class KeptOf>
Best best_rows(ThreadScratch& scratch, const float* p, std::int64_t length, double enough, KeptOf kept_of) {
  // A histogram over p's exponent and upper three bits of its fraction says below which p no row is needed.
  constexpr std::uint32_t kBins = 1024, kShift = 20;  // 2.0 and beyond (none, but for NaN): the last bin
  Bin* bins = scratch.bins.get(kBins);
  std::fill(bins, bins + kBins, Bin{});
  const auto bin_of = [](float value) { return std::min(bits_of(value) >> kShift, kBins - 1); };
  for (std::int64_t j = 0; j < length; ++j) {
    Bin& bin = bins[bin_of(p[j])];
    bin.mass += p[j];
    ++bin.count;
  }
  std::uint32_t last = kBins;
  std::int64_t count = 0, wanted = kept_of(length);
  for (double mass = 0.0;;) {
    if (mass > enough) wanted = std::min(wanted, kept_of(count));  // least where `enough` is first passed
    if (last == 0 || count >= wanted) break;
    --last;
    mass += bins[last].mass;
    count += bins[last].count;
  }

  std::uint64_t* keys = scratch.keys.get(length + 1);  // one more: the loop writes first and counts then
  std::int64_t n = 0;
  for (std::int64_t j = 0; j < length; ++j) {
    keys[n] = key_of(p[j], j);
    n += bin_of(p[j]) >= last;
  }
  return {sort_keys(keys, scratch.sorted.get(n), n), n};
}

}  // namespace

std::int64_t choose(const ChooseRequest& r, const IsaKernels& isa) {
  check(r);
  const AttentionShape& s = r.shape;
  const std::int64_t group = s.num_heads / s.num_kv_heads;
  const std::int64_t room = widest_of(r);
  ThreadScratch& scratch = thread_scratch();
  float* query_room = scratch.query.get(group * s.head_dim);
  float* factors = scratch.factors.get(group);
  std::int32_t* slots = scratch.slots.get(s.device_rows + 1);
  const bool by_mass = r.mass < 1.0;  // all of the mass needs all of the tokens, rounding or not
  std::int64_t widest = 0;

  for (std::int64_t b = 0; b < s.batch; ++b) {
    const std::int64_t local = list_slots(r.empty, b, s.device_rows, slots);
    const auto sequence = static_cast<std::size_t>(b);
    const std::int64_t length = r.scored[sequence], most = r.most[sequence];
    const auto kept_of = [&](std::int64_t n) { return kept(r, sequence, n); };
    const std::int64_t stride = (length + kLine - 1) / kLine * kLine;
    float* local_logits = scratch.local.get(group * local);
    float* exps = scratch.logits.get(group * stride);

    for (std::int64_t h = 0; h < s.num_kv_heads; ++h) {
      const float* query = gather_query(r.query, s, b, h, query_room);
      score(isa, s, r.keys, b, h, slots, local, query, r.scale, local_logits, local);
      double local_p = 0.0;
      for (std::int64_t g = 0; g < group; ++g) {
        const float* here = local_logits + g * local;
        const float* host = at(r.host_logits.data,
                               b * r.host_logits.batch_stride + (h * group + g) * r.host_logits.head_stride);
        const float top = std::max(isa.maximum(here, local), isa.maximum(host, length));
        const float local_sum = isa.exponentials(here, top, nullptr, local);
        const float total = local_sum + isa.exponentials(host, top, exps + g * stride, length);
        factors[g] = local + length > 0 ? 1.0f / (total * static_cast<float>(group)) : 0.0f;
        local_p += static_cast<double>(local_sum) * factors[g];
      }
      const std::int64_t i = b * s.num_kv_heads + h;
      float* p = r.probabilities ? r.probabilities + i * s.host_rows : scratch.p.get(length);
      isa.combine(exps, stride, factors, group, p, length);
      if (r.probabilities) std::fill(p + length, p + s.host_rows, 0.0f);

      const double needed = by_mass ? r.mass - local_p : std::numeric_limits<double>::infinity();
      const Best best = best_rows(scratch, p, length, needed + 1e-9, kept_of);
      std::int64_t n = 0;
      double held = 0.0;
      for (; n < best.n && held < needed; ++n) held += p_of(best.keys[n]);
      if (held < needed) n = most;
      const std::int64_t count = std::min(best.n, kept_of(n));
      std::int64_t* rows = r.rows + i * room;
      held = 0.0;
      for (std::int64_t k = 0; k < count; ++k) {
        held += p_of(best.keys[k]);
        rows[k] = static_cast<std::int64_t>(best.keys[k] & 0xffffffffu);
      }
      r.counts[i] = count;
      r.masses[i] = static_cast<float>(held + local_p);
      widest = std::max(widest, count);
    }
  }

  // From `room` to `widest` elements a head, in place: a head never moves up.
  for (std::int64_t i = 0; i < s.batch * s.num_kv_heads && widest > 0; ++i) {
    const std::int64_t count = r.counts[i];
    std::int64_t* rows = r.rows + i * widest;
    std::memmove(rows, r.rows + i * room, sizeof(std::int64_t) * static_cast<std::size_t>(count));
    std::fill(rows + count, rows + widest, 0);
    std::fill(r.padding + i * widest, r.padding + i * widest + count, false);
    std::fill(r.padding + i * widest + count, r.padding + (i + 1) * widest, true);
  }
  return widest;
}

void attend(const AttendRequest& r, const IsaKernels& isa) {
  check(r);
  const AttentionShape& s = r.shape;
  const std::int64_t group = s.num_heads / s.num_kv_heads;
  ThreadScratch& scratch = thread_scratch();
  float* query_room = scratch.query.get(group * s.head_dim);
  std::int32_t* slots = scratch.slots.get(s.device_rows + 1);
  std::int32_t* rows = scratch.rows.get(r.kept);
  const std::int64_t stride = (s.device_rows + r.kept + kLine - 1) / kLine * kLine;
  float* weights = scratch.logits.get(group * stride);

  for (std::int64_t b = 0; b < s.batch; ++b) {
    const std::int64_t local = list_slots(r.empty, b, s.device_rows, slots);
    for (std::int64_t h = 0; h < s.num_kv_heads; ++h) {
      const std::int64_t i = b * s.num_kv_heads + h;
      const std::int64_t kept = r.kept > 0 ? r.counts[i] : 0;
      std::copy_n(at(r.rows, i * r.kept), kept, rows);  // narrowed; check() has seen that they fit
      const float* query = gather_query(r.query, s, b, h, query_room);
      score(isa, s, r.keys, b, h, slots, local, query, r.scale, weights, stride);
      if (kept > 0) score(isa, s, r.host_keys, b, h, rows, kept, query, r.scale, weights + local, stride);

      const std::int64_t head = b * s.num_heads + h * group;
      for (std::int64_t g = 0; g < group; ++g) {
        float* logits = weights + g * stride;
        const float top = isa.maximum(logits, local + kept);
        const float sum = isa.exponentials(logits, top, logits, local + kept);
        if (r.log_sum) r.log_sum[head + g] = local + kept > 0 ? top + std::log(sum) : top;
        const float factor = 1.0f / sum;
        for (std::int64_t j = 0; j < local + kept; ++j) logits[j] *= factor;
      }
      float* context = r.context + head * s.head_dim;
      std::fill(context, context + group * s.head_dim, 0.0f);
      weigh(isa, s, r.values, b, h, slots, local, weights, stride, context);
      if (kept > 0) weigh(isa, s, r.host_values, b, h, rows, kept, weights + local, stride, context);
    }
  }
}

}  // namespace hybridgen
