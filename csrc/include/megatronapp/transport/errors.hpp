#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

namespace megatronapp::transport {

/// Base of all errors of the transport: wrong use, or what the system refused. The text says what to do.
class TransportError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

/// Two ranks do not agree: other version of the files, slot size, number of slots, job or attempt.
class TransportMismatchError : public TransportError {
  public:
    using TransportError::TransportError;
};

/// Shared memory holds what no rank writes.
class TransportCorruptError : public TransportError {
  public:
    using TransportError::TransportError;
};

/// A key was sent while an earlier message with it was not released yet.
class DuplicateKeyError : public TransportError {
  public:
    using TransportError::TransportError;
};

/// A peer died, or closed its endpoint while this rank needed it.
class PeerLostError : public TransportError {
  public:
    PeerLostError(const std::string& text, std::uint32_t lost_peer) : TransportError(text), peer(lost_peer) {}

    std::uint32_t peer;
};

/// What did not happen in time.
struct Timeout {
    std::uint32_t peer;
    std::optional<std::uint64_t> key;  ///< absent where no message is concerned: while connecting, and in the log
    const char* direction;             ///< "send", "receive" or "connect"
    double seconds;
};

/// A peer that lives did not send, take or register anything within the deadline.
class TransferTimeoutError : public TransportError {
  public:
    TransferTimeoutError(const std::string& text, const Timeout& passed) : TransportError(text), timeout(passed) {}

    Timeout timeout;
};

}  // namespace megatronapp::transport
