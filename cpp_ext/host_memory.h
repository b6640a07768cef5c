// Host memory with a say in where it lies: mapped, on huge pages where the system has them, bound to memory nodes
// before its pages exist, touched from there. System calls and /sys alone, neither Python nor libnuma: a static build
// of it runs as the first process of the guest that proves it (tests/guest).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

namespace hybridgen {

// A system call that was refused; what() names it and its arguments, code().value() is errno.
struct SystemCallError : std::system_error {
  SystemCallError(int error, const std::string& call) : std::system_error(error, std::generic_category(), call) {}
};

struct MemoryNode {
  int id = 0;
  std::vector<int> cpus;              // none: far memory (CXL, HBM)
  std::int64_t memory_bytes = 0;      // 0: it has none, or this process may not use it
  std::int64_t available_bytes = 0;   // free, or held by the page cache alone
  std::map<int, int> distances = {};  // to each node, as the firmware tells; may be empty
};

// The nodes of this machine, by id. Where the kernel tells of none: one node with all CPUs and all memory.
std::vector<MemoryNode> memory_nodes();

// The CPUs that this process may run on.
std::vector<int> allowed_cpus();

// On which nodes keys and values lie; several: their pages take turns.
struct KvPlacement {
  std::vector<int> keys;
  std::vector<int> values;
  std::string reason;  // why keys and values lie together although the policy would part them; else empty
};

// A pure function. Policies:
//   local       both on the near node
//   semantic    keys near, where the CPU scans them; values far, whose rows only the GPU reads
//   inverse     the other way round: the bad case, for comparison
//   interleave  both over all nodes with memory
// near: default the node that has the most of `cpus`, of equal ones the first; if it has no memory, the one closest to
// it, if possible with some of `cpus`.
// far: default the memory-only node closest to `near`, else the closest other node.
// std::invalid_argument: an unknown policy, a node that is not there or has no memory.
KvPlacement place_kv(const std::string& policy, const std::vector<MemoryNode>& nodes, const std::vector<int>& cpus,
                     std::optional<int> near, std::optional<int> far);

// Anonymous private memory (shared memory would get no huge pages), unmapped with the object.
class HostMapping {
 public:
  // reserve: addresses alone, although all of it would not fit into memory now.
  explicit HostMapping(std::size_t bytes, bool reserve = false);
  ~HostMapping();
  HostMapping(const HostMapping&) = delete;
  HostMapping& operator=(const HostMapping&) = delete;

  char* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  // Whether the system has transparent huge pages for it; how many there are shows once it is touched.
  bool huge_pages() const { return huge_pages_; }
  // How much lies on huge pages now; an upper bound where the kernel joined this mapping with a neighbour.
  std::size_t huge_page_bytes() const;

  // The pages that do not exist yet will come from `nodes`: one alone, or several in turn. Pages that exist stay where
  // they are: bind first, touch then.
  void bind(const std::vector<int>& nodes);

  // Makes the pages of [offset, offset + bytes) exist, contents unchanged, by threads on CPUs of `node` where this
  // process may use any, else of the nearest node; anywhere without a node. Returns the node that they ran on (by
  // getcpu); -1 if they were on several.
  int touch(std::size_t offset, std::size_t bytes, std::optional<int> node) const;

  // The node of the page at offset, offset + stride, ...: by move_pages; -ENOENT where there is no page yet.
  std::vector<int> page_nodes(std::size_t offset, std::size_t bytes, std::size_t stride) const;

 private:
  char* data_ = nullptr;
  std::size_t bytes_ = 0;
  bool huge_pages_ = false;
};

}  // namespace hybridgen
