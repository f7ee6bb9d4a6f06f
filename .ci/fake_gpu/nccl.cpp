// libnccl.so.2 for the fake GPUs: ranks meet in a shared file, and read each other's memory, which is the host's.
//
// A collective begins when each rank's stream has reached it. If they do not agree in what they call, it never ends.
#include "shared.h"
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

extern "C" unsigned long fake_push(void *stream, int (*advance)(void *), void *argument);  // device.c

namespace {

enum Result { success = 0, system_error = 2, invalid_argument = 4, remote_error = 6 };
enum Kind { all_reduce, reduce, broadcast, all_gather, reduce_scatter, all_to_all, send_to, receive_from };
enum Operator { sum, prod, maximum, minimum, average, first_own };
enum Type { int8, uint8, int32, uint32, int64, uint64, float16, float32, float64, bfloat16, float8_e4m3, float8_e5m2 };

size_t size_of(int type) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return sizes[type];
}

// What a rank asks for; all but the first line has to be the same in all ranks.
struct Call {
  const void *source; int pid; double factor;
  int kind, type, op, root;
  size_t count;
  bool agrees(const Call &other) const {
    return kind == other.kind && type == other.type && op == other.op && root == other.root && count == other.count;
  }
};

// One rank's place at the table.
struct Seat {
  Call call;
  std::atomic<long> arrived, taken;  // collectives
  int colour, key;
  std::atomic<long> split, left;  // ncclCommSplit's
};

// From one rank to another; each is taken before there is a next.
struct Letter {
  const void *source; int pid;
  size_t bytes;
  std::atomic<long> sent, received;
};

struct Op { int op; double factor; };

}  // namespace

struct ncclUniqueId { char bytes[128]; };

struct ncclComm {
  std::string name;
  int rank, size;
  Seat *seats;
  Letter *letters;
  std::atomic<int> *joined;
  std::atomic<bool> aborted{false}, failed{false};
  std::atomic<long> finished{0};  // collectives
  std::atomic<int> pending{0};    // operations in streams
  long called = 0, splits = 0;
  std::vector<long> sent, received;
  std::vector<Op> own_ops;  // of ncclRedOpCreatePreMulSum

  bool all(std::atomic<long> Seat::*what, long number) const {
    return std::all_of(seats, seats + size, [&](const Seat &seat) { return seat.*what >= number; });
  }
};

namespace {

// ---------------------------------------------------------------- numbers

struct BFloat16 {
  uint16_t bits;
  operator float() const {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
  }
  explicit BFloat16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    bits = (wide + 0x7FFF + (wide >> 16 & 1)) >> 16;  // to the nearest, ties to even
  }
};

// Into `result`, from all ranks' parts in the same order everywhere: all get the same bits.
template <class T, class Wide>
void combine(const std::vector<std::vector<char>> &parts, const Seat *seats, const Call &call, std::vector<char> &result) {
  for (size_t i = 0; i < call.count; i++) {
    Wide total = 0;
    for (size_t rank = 0; rank < parts.size(); rank++) {
      Wide value = reinterpret_cast<const T *>(parts[rank].data())[i];
      if (call.op >= first_own)
        value = Wide(value * seats[rank].call.factor);
      total = rank == 0              ? value
          : call.op == prod    ? total * value
          : call.op == maximum ? std::max(total, value)
          : call.op == minimum ? std::min(total, value)
                               : total + value;
    }
    reinterpret_cast<T *>(result.data())[i] = T(call.op == average ? total / Wide(parts.size()) : total);
  }
}

void combine(const std::vector<std::vector<char>> &parts, const Seat *seats, const Call &call, std::vector<char> &result) {
  switch (call.type) {
    case int8: return combine<int8_t, int8_t>(parts, seats, call, result);
    case uint8: return combine<uint8_t, uint8_t>(parts, seats, call, result);
    case int32: return combine<int32_t, int32_t>(parts, seats, call, result);
    case uint32: return combine<uint32_t, uint32_t>(parts, seats, call, result);
    case int64: return combine<int64_t, int64_t>(parts, seats, call, result);
    case uint64: return combine<uint64_t, uint64_t>(parts, seats, call, result);
    case float16: return combine<_Float16, float>(parts, seats, call, result);
    case float32: return combine<float, float>(parts, seats, call, result);
    case float64: return combine<double, double>(parts, seats, call, result);
    case bfloat16: return combine<BFloat16, float>(parts, seats, call, result);
  }
}

bool read_from(int pid, const void *source, void *target, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    iovec here{static_cast<char *>(target) + done, bytes - done};
    iovec there{static_cast<char *>(const_cast<void *>(source)) + done, bytes - done};
    const auto read = process_vm_readv(pid, &here, 1, &there, 1, 0);
    if (read <= 0)
      return false;  // the peer has ended: its memory is gone, and this never ends
    done += read;
  }
  return true;
}

// ---------------------------------------------------------------- operations of a stream

struct Part {
  ncclComm *comm;
  Call call;
  void *target;
  int peer;
  long number;  // of the comm's collectives, or of those letters
  bool fails, arrived = false, taken = false;
  std::vector<char> result;

  size_t bytes() const { return call.count * size_of(call.type); }

  bool advance() {
    if (comm->aborted)
      return true;
    const char *p2p = getenv("FAKE_NCCL_P2P");
    if (fails || (p2p && !strcmp(p2p, "hang") && arrived && !setting("NCCL_P2P_DISABLE", 0)))
      return false;
    if (call.kind == send_to || call.kind == receive_from)
      return advance_letter();
    if (comm->finished != number - 1)
      return false;
    Seat &own = comm->seats[comm->rank];
    if (!arrived) {
      own.call = call;
      own.arrived = number;
      arrived = true;
      return false;
    }
    if (!taken) {
      if (!comm->all(&Seat::arrived, number) || !take())
        return false;
      own.taken = number;
      taken = true;
    }
    if (!comm->all(&Seat::taken, number))
      return false;
    memcpy(target, result.data(), result.size());  // not earlier: it may be what the others read
    comm->finished = number;
    return true;
  }

  bool advance_letter() {
    const bool sends = call.kind == send_to;
    Letter &letter = comm->letters[sends ? comm->rank * comm->size + peer : peer * comm->size + comm->rank];
    if (sends && !arrived && letter.received == number - 1) {
      letter.source = call.source;
      letter.pid = call.pid;
      letter.bytes = bytes();
      letter.sent = number;
      arrived = true;
    }
    if (sends)
      return letter.received >= number;
    if (letter.sent != number || letter.bytes != bytes() || !read_from(letter.pid, letter.source, target, bytes()))
      return false;
    letter.received = number;
    return true;
  }

  // This rank's result, into `result`.
  bool take() {
    const Seat *seats = comm->seats;
    const int size = comm->size, rank = comm->rank;
    for (int peer = 0; peer < size; peer++)
      if (!call.agrees(seats[peer].call))
        return false;
    const auto read = [&](int peer, size_t offset, char *into) {
      const Call &other = seats[peer].call;
      return read_from(other.pid, static_cast<const char *>(other.source) + offset, into, bytes());
    };
    switch (call.kind) {
      case broadcast:
        result.resize(bytes());
        return read(call.root, 0, result.data());
      case all_gather:
      case all_to_all:
        result.resize(size * bytes());
        for (int peer = 0; peer < size; peer++)
          if (!read(peer, call.kind == all_gather ? 0 : rank * bytes(), result.data() + peer * bytes()))
            return false;
        return true;
      case reduce:
        if (rank != call.root)
          return true;
    }
    std::vector<std::vector<char>> parts(size, std::vector<char>(bytes()));
    for (int peer = 0; peer < size; peer++)
      if (!read(peer, call.kind == reduce_scatter ? rank * bytes() : 0, parts[peer].data()))
        return false;
    result.resize(bytes());
    combine(parts, seats, call, result);
    return true;
  }
};

// What ncclGroupStart and ncclGroupEnd enclose, or one call: its parts go on side by side.
struct Group {
  void *stream;
  std::vector<Part> parts;

  static int advance(void *argument) {
    auto &parts = static_cast<Group *>(argument)->parts;
    parts.erase(std::remove_if(parts.begin(), parts.end(), [](Part &part) {
      if (!part.advance())
        return false;
      part.comm->pending--;
      return true;
    }), parts.end());
    if (!parts.empty())
      return false;
    delete static_cast<Group *>(argument);
    return true;
  }
};

std::atomic<const char *> last_error{""};

thread_local int depth;
thread_local std::vector<Group *> groups;  // one for each stream

int end_group() {
  if (--depth)
    return success;
  for (Group *group : groups)
    fake_push(group->stream, Group::advance, group);
  groups.clear();
  return success;
}

int enqueue(ncclComm *comm, void *stream, Call call, const void *source, void *target, int peer = 0) {
  static std::atomic<long> collectives;
  call.source = source;
  call.pid = getpid();
  if (call.op >= first_own) {
    call.factor = comm->own_ops.at(call.op - first_own).factor;
    call.op = first_own;
  }
  const long number = call.kind == send_to ? ++comm->sent.at(peer)
      : call.kind == receive_from          ? ++comm->received.at(peer)
                                           : ++comm->called;
  const long failing = setting("FAKE_NCCL_FAIL_AT", 0);
  const bool fails = failing && ++collectives >= failing;
  if (fails) {
    comm->failed = true;
    last_error = "the fake NCCL was told to fail (FAKE_NCCL_FAIL_AT)";
  }
  depth++;
  auto found = std::find_if(groups.begin(), groups.end(), [&](Group *group) { return group->stream == stream; });
  Group *group = found != groups.end() ? *found : groups.emplace_back(new Group{stream, {}});
  comm->pending++;
  group->parts.push_back(Part{comm, call, target, peer, number, fails});
  return end_group();
}

// ---------------------------------------------------------------- communicators

// At which a rank waits for its first connection. It never comes: here ranks meet in the file.
int listening_socket() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  sockaddr_in loopback{};
  loopback.sin_family = AF_INET;
  loopback.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  bind(listener, reinterpret_cast<sockaddr *>(&loopback), sizeof loopback);
  listen(listener, 1);
  return listener;
}

// Returns when all ranks have joined, or when somebody shuts down that socket.
int join(ncclComm **made, const std::string &name, int size, int rank) {
  const size_t seats = 64, letters = seats + size * sizeof(Seat), end = letters + size * size * sizeof(Letter);
  char *memory = static_cast<char *>(shared_memory(name.c_str(), end));
  auto *comm = new ncclComm{name, rank, size, reinterpret_cast<Seat *>(memory + seats),
                            reinterpret_cast<Letter *>(memory + letters), reinterpret_cast<std::atomic<int> *>(memory)};
  comm->sent.resize(size);
  comm->received.resize(size);
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);  // with Yama, siblings may read this process's memory only if it says so
  ++*comm->joined;
  const int listener = listening_socket();
  bool shut = false;
  while (*comm->joined < size && !shut)
    shut = accept(listener, nullptr, nullptr) < 0 && errno != EAGAIN;  // computes, as the real one does
  close(listener);
  if (shut)
    return system_error;
  if (rank == 0) {
    char path[4096];
    unlink(shared_path(path, name.c_str()));  // all have opened it
  }
  *made = comm;
  return success;
}

// Communicators are never freed: a stream may have an operation of one that was aborted.
int flush(ncclComm *comm) {
  while (comm->pending && !comm->aborted)
    usleep(1000);
  return success;
}

}  // namespace

extern "C" {

int ncclGetVersion(int *version) { return *version = 22907, success; }
const char *ncclGetErrorString(int error) {
  return error == success      ? "no error"
      : error == system_error ? "unhandled system error"
      : error == remote_error ? "remote process exited or there was a network error"
                              : "invalid usage";
}
const char *ncclGetLastError(ncclComm *) { return last_error; }  // torch asks without a communicator
int ncclGetUniqueId(ncclUniqueId *id) {
  std::random_device random;
  *id = {};
  snprintf(id->bytes, sizeof id->bytes, "nccl-%08x%08x", random(), random());
  return success;
}

int ncclCommInitRank(ncclComm **comm, int size, ncclUniqueId id, int rank) { return join(comm, id.bytes, size, rank); }
int ncclCommInitRankConfig(ncclComm **comm, int size, ncclUniqueId id, int rank, void *) {
  return join(comm, id.bytes, size, rank);
}
int ncclCommInitRankScalable(ncclComm **comm, int size, int rank, int, ncclUniqueId *ids, void *) {
  return join(comm, ids[0].bytes, size, rank);
}
int ncclCommSplit(ncclComm *comm, int colour, int key, ncclComm **made, void *) {
  Seat &own = comm->seats[comm->rank];
  const long number = ++comm->splits;
  while (!comm->all(&Seat::left, number - 1))
    usleep(1000);
  own.colour = colour;
  own.key = key;
  own.split = number;
  while (!comm->all(&Seat::split, number))
    usleep(1000);
  int size = 0, rank = 0;
  for (int peer = 0; peer < comm->size; peer++)
    if (const Seat &other = comm->seats[peer]; other.colour == colour) {
      size++;
      rank += std::pair(other.key, peer) < std::pair(key, comm->rank);
    }
  own.left = number;
  *made = nullptr;
  if (colour < 0)
    return success;  // NCCL_SPLIT_NOCOLOR
  return join(made, comm->name + "-" + std::to_string(number) + "-" + std::to_string(colour), size, rank);
}
int ncclCommFinalize(ncclComm *comm) { return flush(comm); }
int ncclCommDestroy(ncclComm *comm) { return flush(comm); }
int ncclCommAbort(ncclComm *comm) {
  if (!comm) // torch asks for it again
    return success;
  const char *how = getenv("FAKE_NCCL_ABORT");
  while (how && !strcmp(how, "hang"))
    pause();
  comm->aborted = true;
  return success;
}
int ncclCommGetAsyncError(ncclComm *comm, int *error) {
  return *error = comm->failed ? remote_error : success, success;
}
int ncclCommCount(ncclComm *comm, int *size) { return *size = comm->size, success; }
int ncclCommUserRank(ncclComm *comm, int *rank) { return *rank = comm->rank, success; }

int ncclRedOpCreatePreMulSum(int *op, void *factor, int type, int, ncclComm *comm) {
  const double value = type == float64 ? *static_cast<double *>(factor)
      : type == float32                ? *static_cast<float *>(factor)
      : type == float16                ? float(*static_cast<_Float16 *>(factor))
      : type == bfloat16               ? float(*static_cast<BFloat16 *>(factor))
                                       : 1;
  *op = first_own + int(comm->own_ops.size());
  comm->own_ops.push_back({*op, value});
  return success;
}
int ncclRedOpDestroy(int, ncclComm *) { return success; }

int ncclGroupStart() { return depth++, success; }
int ncclGroupEnd() { return end_group(); }

int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, ncclComm *comm, void *stream) {
  return enqueue(comm, stream, {.kind = all_reduce, .type = type, .op = op, .count = count}, from, to);
}
int ncclReduce(const void *from, void *to, size_t count, int type, int op, int root, ncclComm *comm, void *stream) {
  return enqueue(comm, stream, {.kind = reduce, .type = type, .op = op, .root = root, .count = count}, from, to);
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, ncclComm *comm, void *stream) {
  return enqueue(comm, stream, {.kind = broadcast, .type = type, .root = root, .count = count}, from, to);
}
int ncclBcast(void *buffer, size_t count, int type, int root, ncclComm *comm, void *stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}
int ncclAllGather(const void *from, void *to, size_t count, int type, ncclComm *comm, void *stream) {
  return enqueue(comm, stream, {.kind = all_gather, .type = type, .count = count}, from, to);
}
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, ncclComm *comm, void *stream) {
  return enqueue(comm, stream, {.kind = reduce_scatter, .type = type, .op = op, .count = count}, from, to);
}
int ncclAlltoAll(const void *from, void *to, size_t count, int type, ncclComm *comm, void *stream) {
  return enqueue(comm, stream, {.kind = all_to_all, .type = type, .count = count}, from, to);
}
int ncclSend(const void *from, size_t count, int type, int peer, ncclComm *comm, void *stream) {
  return enqueue(comm, stream, {.kind = send_to, .type = type, .count = count}, from, nullptr, peer);
}
int ncclRecv(void *to, size_t count, int type, int peer, ncclComm *comm, void *stream) {
  return enqueue(comm, stream, {.kind = receive_from, .type = type, .count = count}, nullptr, to, peer);
}
}
