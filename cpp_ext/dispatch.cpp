#include "dispatch.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace hybridgen {
namespace {

// The dispatch list, best first: a new ISA is a file in kernels/ and a line here.
const IsaKernels* const kKnown[] = {
#if defined(__x86_64__)
    &kAmx, &kAvx512Vnni, &kAvx512, &kAvx2, &kAmxEmulated,
#endif
    &kScalar,
};

}  // namespace

std::vector<const IsaKernels*> usable_isas() {
  std::vector<const IsaKernels*> usable;
  for (const IsaKernels* isa : kKnown) {
    if (isa->usable()) usable.push_back(isa);
  }
  return usable;
}

const IsaKernels& select_isa(const std::string& name) {
  const char* variable = std::getenv("HYBRIDGEN_CPU_ISA");
  const std::string wanted = !name.empty() ? name : variable ? variable : "";
  const auto usable = usable_isas();
  std::string choices;
  for (const IsaKernels* isa : usable) {
    if (wanted.empty() || wanted == isa->name) {
      if (!isa->enable || isa->enable()) return *isa;
      if (!wanted.empty()) {
        throw std::runtime_error(wanted + ": the system refuses it (" + std::strerror(errno) + ")");
      }
    }
    choices += (choices.empty() ? "" : ", ") + std::string(isa->name);
  }
  throw std::invalid_argument((name.empty() ? "HYBRIDGEN_CPU_ISA='" : "isa='") + wanted +
                              "' is unknown or cannot run on this CPU; available: " + choices);
}

}  // namespace hybridgen
