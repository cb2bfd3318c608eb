#include "megatronapp/transport/shm/directory.hpp"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <exception>
#include <filesystem>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "megatronapp/transport/errors.hpp"
#include "megatronapp/transport/shm/shared_file.hpp"

namespace megatronapp::transport {
namespace {

constexpr std::string_view kMarker = ".transport.";
constexpr std::size_t kLongestJob = 128;

bool is_name_letter(char letter) {
    return (letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z') || (letter >= '0' && letter <= '9') ||
           letter == '-' || letter == '_';
}

std::vector<std::string> names_with_prefix(const std::string& directory, const std::string& prefix) {
    std::vector<std::string> names;
    std::error_code error;
    for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end;
         entry.increment(error)) {
        std::string name = entry->path().filename().string();
        if (name.starts_with(prefix)) {
            names.push_back(std::move(name));
        }
    }
    return names;
}

/// The attempt of a name after "megatronapp-JOB-a", if it is one of the transport.
std::optional<std::uint64_t> attempt_of(std::string_view rest) {
    std::uint64_t attempt = 0;
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), attempt);
    if (error != std::errc{}) {
        return std::nullopt;
    }
    rest.remove_prefix(static_cast<std::size_t>(end - rest.data()));
    return rest.starts_with(kMarker) ? std::optional(attempt) : std::nullopt;
}

}  // namespace

Directory::Directory(std::string path, std::string job, std::uint64_t attempt)
    : path_(std::move(path)), job_(std::move(job)), attempt_(attempt) {
    if (job_.empty() || job_.size() > kLongestJob || !std::all_of(job_.begin(), job_.end(), is_name_letter)) {
        throw TransportError("the job '" + job_ + "' cannot name files; give 1 to " + std::to_string(kLongestJob) +
                             " letters, digits, '-' and '_', such as the job's uid");
    }
    if (!std::filesystem::is_directory(path_)) {
        throw TransportError(path_ + ": not a directory; set MEGATRONAPP_SHM_DIR to a tmpfs such as /dev/shm");
    }
}

std::string Directory::prefix(std::uint32_t rank) const {
    return "megatronapp-" + job_ + "-a" + std::to_string(attempt_) + std::string(kMarker) + "rank" +
           std::to_string(rank) + ".";
}

std::string Directory::board(std::uint32_t rank) const { return path_ + "/" + prefix(rank) + "board"; }

std::string Directory::inbox(std::uint32_t receiver, std::uint32_t sender) const {
    return path_ + "/" + prefix(receiver) + "from" + std::to_string(sender);
}

void Directory::remove_older_attempts() const {
    const std::string of_job = "megatronapp-" + job_ + "-a";
    for (const std::string& name : names_with_prefix(path_, of_job)) {
        const std::optional<std::uint64_t> attempt = attempt_of(std::string_view(name).substr(of_job.size()));
        if (attempt && *attempt < attempt_) {
            ::unlink((path_ + "/" + name).c_str());
        }
    }
}

void Directory::remove_names_if_dead(std::uint32_t rank) const noexcept {
    try {
        const std::optional<SharedFile> file = SharedFile::open(board(rank), 1);
        if (!file || file->locked()) {
            return;
        }
        for (const std::string& name : names_with_prefix(path_, prefix(rank) + "from")) {
            ::unlink((path_ + "/" + name).c_str());
        }
        ::unlink(board(rank).c_str());
    } catch (const std::exception&) {
        return;  // what cannot be opened is no file of ours
    }
}

}  // namespace megatronapp::transport
