/* A reset after a time-out (docs/internode.md), as a model for spin.
 *
 * A sender has issued two puts when its call fails. Both ranks go through reset(): each completes its own operations
 * (quiet), says so, and waits for the other; then both begin a new generation at chunk 1, and two chunks follow. A put
 * of the old generation that lands in the new one overwrites a row that has not been read.
 *
 * Each #ifdef is a mistake.
 */
#define SLOTS 2
#define ROW(generation, seq) (100 * (generation) + (seq))
#ifdef NO_GENERATION
#define TAG(generation, seq) (seq)
#else
#define TAG(generation, seq) (8 * (generation) + (seq))
#endif

byte ring[SLOTS], arrival[SLOTS], agreed;
byte payload_out, arrival_out; /* in flight: bit 2 * generation + seq */
#define BIT(generation, seq) (1 << (2 * (generation) + (seq)))

#define DELIVER(generation, seq)                                                              \
  :: atomic { payload_out & BIT(generation, seq) ->                                           \
              payload_out = payload_out & ~BIT(generation, seq);                              \
              ring[seq - 1] = ROW(generation, seq) }                                          \
  :: atomic { (arrival_out & BIT(generation, seq)) && !(payload_out & BIT(generation, seq)) -> \
              arrival_out = arrival_out & ~BIT(generation, seq);                              \
              arrival[seq - 1] = TAG(generation, seq) }

active proctype network()
{
end:
  do
  DELIVER(1, 1) DELIVER(1, 2) DELIVER(2, 1) DELIVER(2, 2)
  od
}

inline put(generation, seq)
{
  d_step {
    payload_out = payload_out | BIT(generation, seq);
    arrival_out = arrival_out | BIT(generation, seq)
  }
}

active proctype sender()
{
  put(1, 1);
  put(1, 2);
#ifndef NO_QUIET
  payload_out + arrival_out == 0; /* quiet */
#endif
  agreed++;
  agreed == 2;
  put(2, 1);
  put(2, 2)
}

active proctype receiver()
{
  agreed++; /* it has read nothing in generation 1: it is the one whose wait timed out */
  agreed == 2;
  arrival[0] == TAG(2, 1);
  assert(ring[0] == ROW(2, 1));
  arrival[1] == TAG(2, 2);
  assert(ring[1] == ROW(2, 2))
}
