/* High-throughput dispatch between nodes (docs/internode.md), as a model for spin.
 *
 * One rail: `source` on one node, `forwarder` on another, and `receiver`, the forwarder's neighbour over NVLink. Two
 * calls of three and two rows, one row a chunk, two ring slots. The forwarder also has a row of its own for the
 * receiver, which belongs behind those of the source, so its place depends on the source's counts.
 *
 * `network` and `nvlink` deliver what has been issued in any order, but for what stands in their guards. A put reads
 * its source when it is delivered, not when it is issued.
 *
 * Each #ifdef is a mistake. check.py turns them on one by one and expects spin to find the consequence.
 */
#define CALLS 2
#define SLOTS 2
#define DEPTH 2 /* of the notify ring */
#define ROWS(e) (4 - (e))
#define ALL_ROWS 5
#define ROW(e, t) (16 * (e) + (t) + 1)
#define OWN(e) (16 * (e) + 15)
#define SLOT(seq) (((seq) - 1) % SLOTS)

/* Operations in flight: bit n is that of chunk n, or of call n. */
byte payload_out, arrival_out, credit_out, counts_out, announce_out;
#define ISSUE(ops, n) ops = ops | (1 << (n))
#define IN_FLIGHT(ops, n) (ops & (1 << (n)))
#define DELIVERED(ops, n) ops = ops & ~(1 << (n))

/* On the source. */
byte staging[SLOTS], credit[SLOTS], announced[DEPTH];
/* On the forwarder. */
byte ring[SLOTS], arrival[SLOTS], counts[DEPTH], counts_word[DEPTH];
/* On the receiver; the words are stored with release and loaded with acquire. */
byte block[4], block_open, place_word, relayed_counts, relay_word, rows_done;
byte store_out[4], store_call[4]; /* stores over NVLink that are not performed yet, by index */

#ifdef EPOCH_TAG
#define TAG(e, seq) (e) /* the call */
#else
#define TAG(e, seq) (seq) /* the chunk */
#endif
byte tag_of[ALL_ROWS + 1];

#ifdef NO_FENCE
#define AFTER_PAYLOAD(seq) true /* put, then a signal: nothing orders them */
#else
#define AFTER_PAYLOAD(seq) !IN_FLIGHT(payload_out, seq) /* put with signal */
#endif
#ifdef ARRIVAL_COUNTER
#define SIGNAL_ARRIVAL(seq) arrival[0]++ /* SIGNAL_ADD to one word a ring */
#define ARRIVED(e, seq) (arrival[0] >= seq)
#else
#define SIGNAL_ARRIVAL(seq) arrival[SLOT(seq)] = tag_of[seq] /* SIGNAL_SET of one word a slot */
#define ARRIVED(e, seq) (arrival[SLOT(seq)] == TAG(e, seq))
#endif
#ifdef CREDIT_COUNTER
#define SIGNAL_CREDIT(seq) credit[0] = seq /* SIGNAL_SET of one word a ring */
#define CREDITED(seq) (seq <= SLOTS || credit[0] >= seq - SLOTS)
#else
#define SIGNAL_CREDIT(seq) credit[SLOT(seq)] = seq /* SIGNAL_SET of one word a slot */
#define CREDITED(seq) (seq <= SLOTS || credit[SLOT(seq)] == seq - SLOTS)
#endif

#define CHUNK(n)                                                        \
  :: atomic { IN_FLIGHT(payload_out, n) -> DELIVERED(payload_out, n);   \
              ring[SLOT(n)] = staging[SLOT(n)] }                        \
  :: atomic { IN_FLIGHT(arrival_out, n) && AFTER_PAYLOAD(n) ->          \
              DELIVERED(arrival_out, n); SIGNAL_ARRIVAL(n) }            \
  :: atomic { IN_FLIGHT(credit_out, n) -> DELIVERED(credit_out, n);     \
              SIGNAL_CREDIT(n) }
#define CALL(n)                                                         \
  :: atomic { IN_FLIGHT(counts_out, n) -> DELIVERED(counts_out, n);     \
              counts[n % DEPTH] = ROWS(n); counts_word[n % DEPTH] = n } \
  :: atomic { IN_FLIGHT(announce_out, n) -> DELIVERED(announce_out, n); \
              announced[n % DEPTH] = n }

active proctype network()
{
end:
  do
  CHUNK(1) CHUNK(2) CHUNK(3) CHUNK(4) CHUNK(5) CALL(1) CALL(2)
  od
}

#define STORE(index)                                                              \
  :: atomic { store_out[index] ->                                                 \
              assert(block_open == store_call[index]); /* only into an open block */ \
              block[index] = store_out[index]; store_out[index] = 0 }
#define PERFORMED (store_out[0] + store_out[1] + store_out[2] + store_out[3] == 0)

active proctype nvlink()
{
end:
  do
  STORE(0) STORE(1) STORE(2) STORE(3)
  od
}

active proctype source()
{
  byte e, t, seq;
  for (e : 1 .. CALLS) {
    ISSUE(counts_out, e);
    announced[e % DEPTH] == e;
    for (t : 0 .. ROWS(e) - 1) {
      seq++;
#ifndef NO_CREDIT
      CREDITED(seq);
#endif
      d_step {
        staging[SLOT(seq)] = ROW(e, t);
        tag_of[seq] = TAG(e, seq);
        ISSUE(payload_out, seq);
        ISSUE(arrival_out, seq)
      }
    }
  }
}

inline store(index, value)
{
  d_step { store_out[index] = value; store_call[index] = e }
}

active proctype forwarder()
{
  byte e, t, seq, rows, value;
  for (e : 1 .. CALLS) {
    ISSUE(announce_out, e);
#ifndef NO_PLACE
    place_word == e; /* the receiver's announcement: permission to store */
#endif
#ifndef NO_COUNTS
    counts_word[e % DEPTH] == e;
#endif
    rows = counts[e % DEPTH];
    d_step { relayed_counts = rows; relay_word = e }
    store(rows, OWN(e)); /* its own row, behind the rows of the lower rank */
    for (t : 0 .. rows - 1) {
      seq++;
      ARRIVED(e, seq);
#ifdef EARLY_CREDIT
      ISSUE(credit_out, seq);
      value = ring[SLOT(seq)];
#else
      value = ring[SLOT(seq)];
      ISSUE(credit_out, seq);
#endif
      store(t, value)
    }
#ifndef NO_RELEASE
    PERFORMED; /* what a release waits for */
#endif
    rows_done = e
  }
}

active proctype receiver()
{
  byte e, t;
  for (e : 1 .. CALLS) {
    d_step { block[0] = 0; block[1] = 0; block[2] = 0; block[3] = 0; block_open = e }
    place_word = e;
    relay_word == e;
#ifndef NO_DONE
    rows_done == e;
#endif
    d_step {
      for (t : 0 .. ROWS(e) - 1) {
        assert(block[t] == ROW(e, t)) /* every row at its final place */
      }
      assert(relayed_counts == ROWS(e) && block[ROWS(e)] == OWN(e));
      block_open = 0 /* the block is the user's */
    }
  }
}
