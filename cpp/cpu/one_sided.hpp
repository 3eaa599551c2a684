// What the protocol between nodes takes from a network, and nothing more (docs/internode.md, G1 to G6).
#pragma once

#include <cstddef>
#include <cstdint>

namespace deep_moe::cpu {

// Every rank has a block of the same size; an offset means the same place in all of them. Operations return at once and
// are delivered in any order, also those to one rank; only the signal of put_signal comes after all of its data.
class OneSided {
 public:
  virtual ~OneSided() = default;

  virtual char* memory() = 0;  // this rank's block
  // The source may be written again once the receiver has been seen to have the data.
  virtual void put_signal(int rank, std::size_t to, std::size_t from, std::size_t bytes, std::size_t signal,
                          std::uint64_t value) = 0;
  virtual void signal(int rank, std::size_t signal, std::uint64_t value) = 0;
  // The word's value; what was delivered before it is visible (acquire).
  virtual std::uint64_t test(std::size_t signal) = 0;
  // All that this rank has issued is delivered (G5). For resets and departures alone.
  virtual void quiet() = 0;
};

}  // namespace deep_moe::cpu
