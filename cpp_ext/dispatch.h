// Which kernels run on this CPU, and which of them are used.
#pragma once

#include <string>
#include <vector>

#include "kernels/scan.h"

namespace hybridgen {

// Every variant that this build knows and this CPU and OS run, best first. The last one is always "scalar".
std::vector<const IsaKernels*> usable_isas();

// The variant `name`, or, if `name` is empty, the one that the environment variable HYBRIDGEN_CPU_ISA names, or, if
// that is unset or empty, the best. Throws std::invalid_argument, naming the choices, where it cannot run.
const IsaKernels& select_isa(const std::string& name = "");

}  // namespace hybridgen
