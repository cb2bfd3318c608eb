#pragma once

#include <cstdint>
#include <string>

namespace megatronapp::transport {

/// The names of one attempt's files in the directory of shared memory. Only these are ever removed, never a pattern
/// that another job's files could match.
class Directory {
  public:
    /// Raises TransportError for a job whose name cannot be part of a file's name.
    Directory(std::string path, std::string job, std::uint64_t attempt);

    [[nodiscard]] std::string board(std::uint32_t rank) const;
    /// The file of messages from `sender` to `receiver`, which the receiver makes.
    [[nodiscard]] std::string inbox(std::uint32_t receiver, std::uint32_t sender) const;

    [[nodiscard]] const std::string& path() const noexcept { return path_; }
    [[nodiscard]] const std::string& job() const noexcept { return job_; }
    [[nodiscard]] std::uint64_t attempt() const noexcept { return attempt_; }

    /// Removes the names that older attempts of the job left. What processes have open stays usable to them.
    void remove_older_attempts() const;

    /// Removes the names of a rank of this attempt if that rank is dead. Its board is made first and loses its name
    /// last, so that no other file of the rank has one without it.
    void remove_names_if_dead(std::uint32_t rank) const noexcept;

  private:
    [[nodiscard]] std::string prefix(std::uint32_t rank) const;

    std::string path_;
    std::string job_;
    std::uint64_t attempt_;
};

}  // namespace megatronapp::transport
