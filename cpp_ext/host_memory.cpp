#include "host_memory.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>

namespace hybridgen {
namespace {

// From the kernel's mempolicy.h, which is not installed everywhere.
constexpr int kBind = 2;
constexpr int kInterleave = 3;

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kTouchPerThread = std::size_t{64} << 20;  // less is not worth a thread
constexpr std::size_t kMostTouchThreads = 16;
const std::string kNodeFolder = "/sys/devices/system/node/";

std::size_t page_bytes() {
  static const auto size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

// Read with C's files, not with streams: CUDA's libraries bring parts of a second C++ runtime into the process, and a
// stream made of both crashes.
std::vector<std::string> read_lines(const std::string& path, std::size_t most = SIZE_MAX) {
  std::vector<std::string> lines;
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "re"), [](FILE* open) {
    return open == nullptr ? 0 : std::fclose(open);
  });
  char* line = nullptr;
  std::size_t room = 0;
  while (file != nullptr && lines.size() < most && getline(&line, &room, file.get()) >= 0) lines.emplace_back(line);
  std::free(line);
  return lines;
}

std::string first_line(const std::string& path) {
  const auto lines = read_lines(path, 1);
  return lines.empty() ? "" : lines.front();
}

// "0-3,8" -> 0 1 2 3 8
std::vector<int> parse_list(const std::string& text) {
  std::vector<int> numbers;
  for (std::size_t at = 0; at < text.size();) {
    int first = 0, last = 0;
    const int read = std::sscanf(text.c_str() + at, "%d-%d", &first, &last);
    for (int number = first; read >= 1 && number <= (read == 2 ? last : first); ++number) numbers.push_back(number);
    const std::size_t comma = text.find(',', at);
    at = comma == std::string::npos ? text.size() : comma + 1;
  }
  return numbers;
}

std::string join(const std::vector<int>& numbers) {
  std::string text;
  for (const int number : numbers) text += (text.empty() ? "" : ",") + std::to_string(number);
  return text;
}

bool contains(const std::vector<int>& numbers, int number) {
  return std::find(numbers.begin(), numbers.end(), number) != numbers.end();
}

std::size_t count_common(const std::vector<int>& a, const std::vector<int>& b) {
  return static_cast<std::size_t>(std::count_if(a.begin(), a.end(), [&](int number) { return contains(b, number); }));
}

// A control group may take nodes away.
std::vector<int> allowed_nodes() {
  const std::string label = "Mems_allowed_list:";
  for (const std::string& line : read_lines("/proc/self/status")) {
    if (line.rfind(label, 0) == 0) return parse_list(line.substr(label.size()));
  }
  return {};
}

void read_memory(MemoryNode& node) {
  for (const std::string& line : read_lines(kNodeFolder + "node" + std::to_string(node.id) + "/meminfo")) {
    char name[64];
    long long kib = 0;
    if (std::sscanf(line.c_str(), "Node %*d %63[^:]: %lld kB", name, &kib) != 2) continue;
    const std::string field = name;
    if (field == "MemTotal") node.memory_bytes = kib * 1024;
    if (field == "MemFree" || field == "Active(file)" || field == "Inactive(file)" || field == "SReclaimable") {
      node.available_bytes += kib * 1024;
    }
  }
}

int distance(const MemoryNode& from, int to) {
  const auto found = from.distances.find(to);
  return found == from.distances.end() ? INT_MAX : found->second;
}

const MemoryNode* find_node(const std::vector<MemoryNode>& nodes, int id) {
  for (const MemoryNode& node : nodes) {
    if (node.id == id) return &node;
  }
  return nullptr;
}

// Of the nodes that `fits` accepts the one closest to `from`, of equal ones the first.
template <class Fits>
const MemoryNode* closest(const std::vector<MemoryNode>& nodes, const MemoryNode& from, Fits fits) {
  const MemoryNode* best = nullptr;
  for (const MemoryNode& node : nodes) {
    if (fits(node) && (best == nullptr || distance(from, node.id) < distance(from, best->id))) best = &node;
  }
  return best;
}

bool has_memory(const MemoryNode& node) { return node.memory_bytes > 0; }

int near_node(const std::vector<MemoryNode>& nodes, const std::vector<int>& cpus) {
  const auto more_cpus = [&](const MemoryNode& a, const MemoryNode& b) {
    return count_common(a.cpus, cpus) < count_common(b.cpus, cpus);
  };
  const auto most = std::max_element(nodes.begin(), nodes.end(), more_cpus);  // of equal ones the first
  if (has_memory(*most)) return most->id;
  const auto usable = [&](const MemoryNode& node) { return has_memory(node) && count_common(node.cpus, cpus) > 0; };
  const MemoryNode* node = closest(nodes, *most, usable);
  return (node != nullptr ? node : closest(nodes, *most, has_memory))->id;
}

int named_node(const std::vector<MemoryNode>& nodes, int id, const char* argument, const std::vector<int>& usable) {
  const MemoryNode* node = find_node(nodes, id);
  if (node != nullptr && has_memory(*node)) return id;
  throw std::invalid_argument(std::string(argument) + " node " + std::to_string(id) +
                              (node == nullptr ? " is not there" : " has no memory that this process may use") +
                              " (nodes with memory: " + join(usable) + ")");
}

bool huge_pages_off() {
  const std::string modes = first_line("/sys/kernel/mm/transparent_hugepage/enabled");
  return modes.empty() || modes.find("[never]") != std::string::npos || prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0) == 1;
}

void run_on(const std::vector<int>& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) {
    if (cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  }
  sched_setaffinity(0, sizeof set, &set);  // where it is refused, getcpu tells where the thread ran
}

int current_node() {
  unsigned cpu = 0, node = 0;
  return syscall(SYS_getcpu, &cpu, &node, nullptr) == 0 ? static_cast<int>(node) : -1;
}

// The CPUs from which pages of `id` are touched.
std::vector<int> touching_cpus(int id) {
  const auto nodes = memory_nodes();
  const auto allowed = allowed_cpus();
  const MemoryNode* node = find_node(nodes, id);
  if (node == nullptr) return allowed;
  // A node is closest to itself: its own CPUs, where there are any.
  const auto usable = [&](const MemoryNode& other) { return count_common(other.cpus, allowed) > 0; };
  const MemoryNode* from = usable(*node) ? node : closest(nodes, *node, usable);
  if (from == nullptr) return allowed;
  std::vector<int> cpus;
  std::copy_if(from->cpus.begin(), from->cpus.end(), std::back_inserter(cpus),
               [&](int cpu) { return contains(allowed, cpu); });
  return cpus;
}

}  // namespace

std::vector<int> allowed_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  // Of the process, not of the calling thread, which may be pinned.
  if (sched_getaffinity(getpid(), sizeof set, &set) != 0) throw SystemCallError(errno, "sched_getaffinity");
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

std::vector<MemoryNode> memory_nodes() {
  const auto online = parse_list(first_line(kNodeFolder + "online"));
  const auto allowed = allowed_nodes();
  std::vector<MemoryNode> nodes;
  for (const int id : online) {
    MemoryNode node;
    node.id = id;
    const std::string folder = kNodeFolder + "node" + std::to_string(id) + "/";
    node.cpus = parse_list(first_line(folder + "cpulist"));
    if (allowed.empty() || contains(allowed, id)) read_memory(node);
    const std::string distances = first_line(folder + "distance");
    const char* row = distances.c_str();
    for (const int other : online) {
      char* after = nullptr;
      const long to = std::strtol(row, &after, 10);
      if (after == row) break;
      node.distances[other] = static_cast<int>(to);
      row = after;
    }
    nodes.push_back(node);
  }
  if (std::none_of(nodes.begin(), nodes.end(), has_memory)) {
    MemoryNode whole;
    whole.cpus = allowed_cpus();
    whole.memory_bytes = static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
    whole.available_bytes = static_cast<std::int64_t>(sysconf(_SC_AVPHYS_PAGES)) * sysconf(_SC_PAGESIZE);
    nodes = {whole};
  }
  return nodes;
}

KvPlacement place_kv(const std::string& policy, const std::vector<MemoryNode>& nodes, const std::vector<int>& cpus,
                     std::optional<int> near, std::optional<int> far) {
  std::vector<int> usable;
  for (const MemoryNode& node : nodes) {
    if (has_memory(node)) usable.push_back(node.id);
  }
  if (usable.empty()) throw std::invalid_argument("no node has memory");
  const bool parts = policy == "semantic" || policy == "inverse";
  if (!parts && policy != "local" && policy != "interleave") {
    throw std::invalid_argument("memory policy '" + policy + "': must be one of local, semantic, interleave, inverse");
  }
  const int k = near ? named_node(nodes, *near, "near", usable) : near_node(nodes, cpus);
  std::optional<int> v;
  if (far) {
    v = named_node(nodes, *far, "far", usable);
  } else {
    const MemoryNode& from = *find_node(nodes, k);
    const auto other = [&](const MemoryNode& node) { return has_memory(node) && node.id != k; };
    const auto memory_only = [&](const MemoryNode& node) { return other(node) && node.cpus.empty(); };
    const MemoryNode* node = closest(nodes, from, memory_only);
    if (node == nullptr) node = closest(nodes, from, other);
    if (node != nullptr) v = node->id;
  }
  if (policy == "local") return {{k}, {k}, ""};
  if (usable.size() == 1) {
    return {{k}, {k}, "node " + std::to_string(k) + " alone has memory: there is nothing to " +
                          (parts ? "separate" : "interleave")};
  }
  if (policy == "interleave") return {usable, usable, ""};
  if (*v == k) {
    return {{k}, {k}, "node " + std::to_string(k) + " is both near and far: there is nothing to separate"};
  }
  return policy == "semantic" ? KvPlacement{{k}, {*v}, ""} : KvPlacement{{*v}, {k}, ""};
}

HostMapping::HostMapping(std::size_t bytes, bool reserve) {
  const std::size_t page = page_bytes();
  bytes_ = (std::max<std::size_t>(bytes, 1) + page - 1) / page * page;
  // More than is needed, then cut off: only whole huge pages at their own alignment can be huge.
  const std::size_t slack = bytes_ >= kHugePage ? kHugePage : 0;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | (reserve ? MAP_NORESERVE : 0);
  void* mapped = mmap(nullptr, bytes_ + slack, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (mapped == MAP_FAILED) throw SystemCallError(errno, "mmap(" + std::to_string(bytes_ + slack) + " bytes)");
  char* base = static_cast<char*>(mapped);
  const std::size_t over = reinterpret_cast<std::uintptr_t>(base) % kHugePage;
  const std::size_t before = slack == 0 || over == 0 ? 0 : kHugePage - over;
  data_ = base + before;
  if (before > 0) munmap(base, before);
  if (slack > before) munmap(data_ + bytes_, slack - before);
  huge_pages_ = madvise(data_, bytes_, MADV_HUGEPAGE) == 0 && !huge_pages_off();
}

HostMapping::~HostMapping() { munmap(data_, bytes_); }

std::size_t HostMapping::huge_page_bytes() const {
  const auto first = reinterpret_cast<std::uintptr_t>(data_), last = first + bytes_;
  std::size_t total = 0, overlap = 0;
  for (const std::string& line : read_lines("/proc/self/smaps")) {
    unsigned long begin = 0, end = 0, kib = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) {
      const auto from = std::max<std::uintptr_t>(begin, first), to = std::min<std::uintptr_t>(end, last);
      overlap = to > from ? to - from : 0;
    } else if (overlap > 0 && std::sscanf(line.c_str(), "AnonHugePages: %lu kB", &kib) == 1) {
      total += std::min<std::size_t>(overlap, std::size_t{kib} * 1024);
    }
  }
  return total;
}

void HostMapping::bind(const std::vector<int>& nodes) {
  constexpr int kBits = CHAR_BIT * sizeof(unsigned long);
  if (nodes.empty()) throw std::invalid_argument("bind: no nodes");
  if (*std::min_element(nodes.begin(), nodes.end()) < 0) throw std::invalid_argument("bind: nodes=" + join(nodes));
  std::vector<unsigned long> mask(*std::max_element(nodes.begin(), nodes.end()) / kBits + 1);
  for (const int node : nodes) mask[node / kBits] |= 1UL << (node % kBits);
  const int mode = nodes.size() == 1 ? kBind : kInterleave;
  // The kernel reads one bit less than it is told.
  if (syscall(SYS_mbind, data_, bytes_, mode, mask.data(), mask.size() * kBits + 1, 0) != 0) {
    throw SystemCallError(errno, "mbind(" + std::to_string(bytes_) + " bytes, nodes " + join(nodes) + ")");
  }
}

int HostMapping::touch(std::size_t offset, std::size_t bytes, std::optional<int> node) const {
  if (offset > bytes_ || bytes > bytes_ - offset) throw std::invalid_argument("touch: beyond the mapping");
  const auto cpus = node ? touching_cpus(*node) : allowed_cpus();
  const std::size_t most = std::min(cpus.size(), kMostTouchThreads);
  const std::size_t count = std::clamp<std::size_t>(bytes / kTouchPerThread, 1, most);
  const std::size_t share = (bytes / count / kHugePage + 1) * kHugePage;  // two threads do not meet in one huge page
  std::vector<int> ran_on(count, -1);
  const auto work = [&](std::size_t thread) {
    run_on(cpus);
    ran_on[thread] = current_node();
    const std::size_t end = offset + std::min(bytes, (thread + 1) * share);
    for (std::size_t at = offset + thread * share; at < end; at += page_bytes()) {
      __atomic_fetch_or(data_ + at, 0, __ATOMIC_RELAXED);  // a write, or the kernel would lend its page of zeros
    }
  };
  std::vector<std::thread> threads;
  try {
    for (std::size_t i = 0; i < count; ++i) threads.emplace_back(work, i);
  } catch (...) {
    for (auto& thread : threads) thread.join();
    throw;
  }
  for (auto& thread : threads) thread.join();
  const bool together = std::all_of(ran_on.begin(), ran_on.end(), [&](int where) { return where == ran_on.front(); });
  return together ? ran_on.front() : -1;
}

std::vector<int> HostMapping::page_nodes(std::size_t offset, std::size_t bytes, std::size_t stride) const {
  if (offset > bytes_ || bytes > bytes_ - offset) throw std::invalid_argument("page_nodes: beyond the mapping");
  std::vector<void*> pages;
  for (std::size_t at = 0; at < bytes; at += std::max(stride, page_bytes())) pages.push_back(data_ + offset + at);
  std::vector<int> nodes(pages.size(), -ENOENT);
  if (!pages.empty() && syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, nodes.data(), 0) != 0) {
    throw SystemCallError(errno, "move_pages(" + std::to_string(pages.size()) + " pages)");
  }
  std::replace(nodes.begin(), nodes.end(), -EFAULT, -ENOENT);  // what some kernels say of a page that is not there
  return nodes;
}

}  // namespace hybridgen
