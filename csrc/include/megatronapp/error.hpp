#pragma once

#include <stdexcept>

namespace megatronapp {

/// A ring that cannot be made, opened or trusted. The text names the file and what is wrong with it.
class RingError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

}  // namespace megatronapp
