// Typed errors. Each maps one to one to a Python exception of the same name, TimeoutError to DeepMoeTimeoutError.
#pragma once

#include <stdexcept>
#include <string>

namespace deep_moe {

// Root of everything that is not simply a wrong argument.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A wait passed its deadline. The text names who waited for whom, in which phase, expected and seen values.
class TimeoutError : public Error {
 public:
  using Error::Error;
};

// A peer's process ended, or the peer destroyed its Buffer, while this rank still needed it.
class PeerLostError : public Error {
 public:
  using Error::Error;
};

// A peer refused the arguments of this call; the text quotes its reason. The Buffer stays usable.
class PeerRefusedError : public Error {
 public:
  using Error::Error;
};

// The ranks did not make the same call (kind, shapes or dtypes differ). The text names both calls.
class CallMismatchError : public Error {
 public:
  using Error::Error;
};

// A size cannot be had: the text names the bytes needed and what to raise. In Python also a ValueError.
class BufferTooSmallError : public Error {
 public:
  using Error::Error;
};

// Use after destroy().
class DestroyedError : public Error {
 public:
  using Error::Error;
};

// Use of a Buffer in a child process that was forked after the Buffer was made.
class ForkedProcessError : public Error {
 public:
  using Error::Error;
};

// A part that this build or this machine does not have; the text says what to install.
class UnavailableError : public Error {
 public:
  using Error::Error;
};

// Wrong arguments. In Python: ValueError and TypeError.
class ArgumentError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};
class ArgumentTypeError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

}  // namespace deep_moe
