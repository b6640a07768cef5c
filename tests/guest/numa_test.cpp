// Where pages lie, for every policy: runs in the guest that scripts/guest_test.sh boots, on its three memory nodes,
// and reads back from the kernel (move_pages) what cpp_ext/host_memory.cpp asked for. One line a check.
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "host_memory.h"

using hybridgen::HostMapping;
using hybridgen::MemoryNode;

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kHugePage = 2 << 20;
constexpr std::size_t kBytes = 12 * kHugePage;  // a multiple of three nodes
constexpr int kAbsent = -ENOENT;

int checks = 0, failed = 0;

__attribute__((format(printf, 2, 3))) void check(bool good, const char* format, ...) {
  ++checks;
  failed += good ? 0 : 1;
  std::printf("guest: %s ", good ? "PASS" : "FAIL");
  va_list arguments;
  va_start(arguments, format);
  std::vprintf(format, arguments);
  va_end(arguments);
  std::printf("\n");
}

std::map<int, std::size_t> count_pages(const HostMapping& memory, std::size_t offset, std::size_t bytes) {
  std::map<int, std::size_t> counts;
  for (const int node : memory.page_nodes(offset, bytes, kPage)) ++counts[node];
  return counts;
}

std::string describe(const std::map<int, std::size_t>& counts) {
  std::string text;
  for (const auto& [node, pages] : counts) {
    text += (text.empty() ? "" : ", ") + std::to_string(pages) + " pages ";
    text += node == kAbsent ? "absent" : "on node " + std::to_string(node);
  }
  return text;
}

std::map<int, std::size_t> spread(const std::vector<int>& nodes, std::size_t bytes) {
  std::map<int, std::size_t> counts;
  for (const int node : nodes) counts[node] = bytes / kPage / nodes.size();
  return counts;
}

// The node whose CPUs touch: node 2 has none, and node 1 is the one closest to it.
int toucher(int node) { return node == 2 ? 1 : node; }

void check_slab(const std::string& name, const std::vector<int>& asked, const std::vector<int>& expected, bool huge) {
  HostMapping memory(kBytes);
  memory.bind(asked);
  const auto before = count_pages(memory, 0, kBytes);
  const auto node = asked.size() == 1 ? std::optional<int>(asked[0]) : std::nullopt;
  const int from = memory.touch(0, kBytes, node);
  const auto counts = count_pages(memory, 0, kBytes);
  const bool bound_first = before == std::map<int, std::size_t>{{kAbsent, kBytes / kPage}};
  const bool from_there = expected.size() > 1 || from == toucher(expected[0]);
  const bool as_huge = memory.huge_pages() == huge && memory.huge_page_bytes() == (huge ? kBytes : 0);
  const auto where = expected.size() > 1 ? std::string("anywhere") : "node " + std::to_string(from);
  check(bound_first && from_there && as_huge && counts == spread(expected, kBytes),
        "%s: %s, %zu MiB huge, touched from %s%s", name.c_str(), describe(counts).c_str(),
        memory.huge_page_bytes() >> 20, where.c_str(), bound_first ? "" : ", but pages were there before");
}

struct Case {
  const char* name;
  const char* policy;
  std::vector<int> cpus;  // of the process
  std::optional<int> near, far;
  std::vector<int> keys, values;
};

// CPU 0 is node 0's, CPU 1 is node 1's; node 2 has memory alone.
const std::vector<Case> kCases = {
    {"local", "local", {0, 1}, {}, {}, {0}, {0}},
    {"semantic", "semantic", {0, 1}, {}, {}, {0}, {2}},
    {"inverse", "inverse", {0, 1}, {}, {}, {2}, {0}},
    {"interleave", "interleave", {0, 1}, {}, {}, {0, 1, 2}, {0, 1, 2}},
    {"local on CPU 1", "local", {1}, {}, {}, {1}, {1}},
    {"semantic on CPU 1", "semantic", {1}, {}, {}, {1}, {2}},
    {"local near=2", "local", {0, 1}, 2, {}, {2}, {2}},
    {"semantic near=1 far=0", "semantic", {0, 1}, 1, 0, {1}, {0}},
    {"inverse near=1 far=0", "inverse", {0, 1}, 1, 0, {0}, {1}},
    {"semantic near=2", "semantic", {0, 1}, 2, {}, {2}, {1}},
};

void check_policies(const std::vector<MemoryNode>& nodes, bool huge) {
  std::ofstream("/sys/kernel/mm/transparent_hugepage/enabled") << (huge ? "madvise" : "never");
  const std::string pages = huge ? "huge pages, " : "small pages, ";
  for (const Case& c : kCases) {
    const auto placed = hybridgen::place_kv(c.policy, nodes, c.cpus, c.near, c.far);
    check_slab(pages + c.name + ", keys", placed.keys, c.keys, huge);
    check_slab(pages + c.name + ", values", placed.values, c.values, huge);
  }
}

// The order matters: pages that exist stay where they are, also when they are touched again.
void check_bind_after_touch() {
  HostMapping memory(kBytes);
  const std::size_t half = kBytes / 2;
  memory.touch(0, half, 0);
  memory.bind({2});
  memory.touch(0, kBytes, 2);
  const auto old = count_pages(memory, 0, half), late = count_pages(memory, half, half);
  check(old == spread({0}, half), "bind after touch, touched before the bind to node 2: %s", describe(old).c_str());
  check(late == spread({2}, half), "bind after touch, touched after the bind to node 2: %s", describe(late).c_str());
}

void check_no_bind() {
  HostMapping memory(kBytes);
  memory.touch(0, kBytes, 1);
  const auto counts = count_pages(memory, 0, kBytes);
  check(counts == spread({1}, kBytes), "no bind, touched from node 1: %s", describe(counts).c_str());
}

void check_growth() {
  HostMapping memory(std::size_t{1} << 36, true);  // 64 GiB of addresses in a guest with less than one
  memory.bind({2});
  memory.touch(0, kBytes, 2);
  memory.data()[5] = 7;
  memory.touch(0, 2 * kBytes, 2);
  const auto counts = count_pages(memory, 0, 2 * kBytes);
  const auto beyond = count_pages(memory, 2 * kBytes, kBytes);
  check(counts == spread({2}, 2 * kBytes) && beyond.count(kAbsent) == 1 && beyond.size() == 1 && memory.data()[5] == 7,
        "growth in place: %s, what was written is there", describe(counts).c_str());
}

void check_refusal() {
  try {
    HostMapping(kBytes).bind({5});
    check(false, "a node that is not there: accepted");
  } catch (const hybridgen::SystemCallError& error) {
    check(error.code().value() == EINVAL, "a node that is not there: %s", error.what());
  }
}

bool is_as_booted(const std::vector<MemoryNode>& nodes) {
  return nodes.size() == 3 && nodes[0].cpus == std::vector<int>{0} && nodes[1].cpus == std::vector<int>{1} &&
         nodes[2].cpus.empty() && nodes[0].memory_bytes > 0 && nodes[1].memory_bytes > 0 && nodes[2].memory_bytes > 0;
}

}  // namespace

int main() {
  const auto nodes = hybridgen::memory_nodes();
  for (const MemoryNode& node : nodes) {
    std::printf("guest: node %d: %zu CPUs, %lld MiB, %lld MiB available\n", node.id, node.cpus.size(),
                static_cast<long long>(node.memory_bytes >> 20), static_cast<long long>(node.available_bytes >> 20));
  }
  check(is_as_booted(nodes), "nodes: two with a CPU each, one with memory alone");
  if (failed == 0) {
    check_policies(nodes, true);
    check_bind_after_touch();
    check_no_bind();
    check_growth();
    check_refusal();
    check_policies(nodes, false);
    check_bind_after_touch();
  }
  std::printf("guest: %d checks, %d failed\n", checks, failed);
  return failed == 0 ? 0 : 1;
}
