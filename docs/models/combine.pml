/* High-throughput combine between nodes (docs/internode.md), as a model for spin.
 *
 * Three nodes on one rail, one rank each. Every rank is a collector, which sends the sums of its node to the two other
 * ranks, and an owner, which adds what the two others send, in the order of its tokens. Two tokens a rank, one slot of
 * one row a ring: the smallest rings that there can be.
 *
 * A process `wire` a ring delivers puts and credits in any order. A put with signal is delivered as a whole here; that
 * this is enough is what dispatch.pml shows. Each #ifdef is a mistake.
 */
#define NODES 3
#define TOKENS 2
#define RING(from, to) ((from) * NODES + (to))
#define ROW(r, seq) ((r) + 10 * (seq))

byte staging[9], ring[9], arrival[9], credit[9];
byte put_out[9], credit_out[9]; /* in flight: bit n is that of row n */

#define DELIVER(n)                                              \
  :: atomic { put_out[r] & (1 << n) ->                          \
              put_out[r] = put_out[r] & ~(1 << n);              \
              ring[r] = staging[r]; arrival[r] = n }            \
  :: atomic { credit_out[r] & (1 << n) ->                       \
              credit_out[r] = credit_out[r] & ~(1 << n);        \
              credit[r] = n }

proctype wire(byte r)
{
end:
  do
  DELIVER(1) DELIVER(2)
  od
}

#ifdef NO_CREDIT
#define CREDITED(r, sent) true
#else
#define CREDITED(r, sent) (credit[r] == sent)
#endif

#define SEND(r, sent)        \
  sent++;                    \
  staging[r] = ROW(r, sent); \
  put_out[r] = put_out[r] | (1 << sent)

proctype collector(byte me)
{
  byte a = RING(me, (me + 1) % NODES), b = RING(me, (me + 2) % NODES), sent_a, sent_b;
#ifdef BLOCKING
  /* One ring after the other, waiting for the credit of each. */
  do
  :: sent_a < TOKENS -> atomic { CREDITED(a, sent_a) -> SEND(a, sent_a) }
  :: sent_a == TOKENS && sent_b < TOKENS -> atomic { CREDITED(b, sent_b) -> SEND(b, sent_b) }
  :: sent_b == TOKENS -> break
  od
#else
  /* Whichever ring has a credit: no wait for one ring holds up another. */
  do
  :: atomic { sent_a < TOKENS && CREDITED(a, sent_a) -> SEND(a, sent_a) }
  :: atomic { sent_b < TOKENS && CREDITED(b, sent_b) -> SEND(b, sent_b) }
  :: sent_a == TOKENS && sent_b == TOKENS -> break
  od
#endif
}

proctype owner(byte me)
{
  byte token, r, i;
  for (token : 1 .. TOKENS) {
    for (i : 1 .. NODES - 1) { /* all rows of a token, then their credits */
      r = RING((me + i) % NODES, me);
      arrival[r] == token
    }
    for (i : 1 .. NODES - 1) {
      r = RING((me + i) % NODES, me);
      atomic {
        assert(ring[r] == ROW(r, token));
        credit_out[r] = credit_out[r] | (1 << token)
      }
    }
  }
}

init
{
  atomic {
    run wire(RING(0, 1)); run wire(RING(0, 2));
    run wire(RING(1, 0)); run wire(RING(1, 2));
    run wire(RING(2, 0)); run wire(RING(2, 1));
    run collector(0); run collector(1); run collector(2);
    run owner(0); run owner(1); run owner(2)
  }
}
