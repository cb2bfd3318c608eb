/// Fuzzing without a fuzzing engine: each target is a function of a seed, run in a child process that may crash or
/// hang.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace megatronapp::transport::fuzzing {

/// Runs the case of a seed. A defect is any exception, crash, report of a sanitizer, or case that does not end.
using Target = void (*)(std::uint64_t seed);

struct NamedTarget {
    const char* name;
    Target run;
};

class Defect : public std::logic_error {
  public:
    using std::logic_error::logic_error;
};

inline void require(bool condition, const std::string& text) {
    if (!condition) {
        throw Defect(text);
    }
}

/// Two connected ranks that exchange messages, while something else writes to their shared memory.
void fuzz_transfers(std::uint64_t seed);

/// Two ranks that connect, while something else changes or replaces their files.
void fuzz_connecting(std::uint64_t seed);

/// Headers of messages between nodes, with a right check and without.
void fuzz_network(std::uint64_t seed);

}  // namespace megatronapp::transport::fuzzing
