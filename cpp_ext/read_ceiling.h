// How fast memory can be read at all: what hybridgen.bench holds the kernels against.
#pragma once

#include <cstddef>
#include <vector>

namespace hybridgen {

struct ReadLoop {
  int streams = 1;               // places in a chunk that are read in turn: 1, 2, 4 or 8
  std::size_t ahead_bytes = 0;   // from a load to the software prefetch beside it; 0: none
  std::size_t chunk_bytes = 0;   // what a thread takes at a time; a multiple of 512
};

// Seconds, from the first load to the last, in which one thread on each of `cores` together load [data, data + bytes)
// `passes` times and do nothing else with it. The tail of the bytes that fills no chunk is left out; `walked` gets what
// was read. std::invalid_argument: a loop, cores or sizes that make no sense.
double read_seconds(const void* data, std::size_t bytes, int passes, const std::vector<int>& cores,
                    const ReadLoop& loop, std::size_t* walked);

}  // namespace hybridgen
