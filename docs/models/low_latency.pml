/* Low latency between nodes (docs/internode.md), as a model for spin.
 *
 * Two ranks, two slots, three calls, two calls in flight: each rank sends calls 1 and 2, takes 1, sends 3, takes 2 and 3.
 * A send waits for the slot's consumed word alone; nothing else tells it that the peer has read what it overwrites.
 *
 * A process `wire` a rank delivers what that rank has issued, in any order, but for what stands in its guards. Each
 * #ifdef is a mistake.
 */
#define CALLS 3
#define SLOTS 2
#define AT(rank, e) ((rank) * SLOTS + (e) % SLOTS)
#define ROWS(rank, e) (10 * (e) + (rank) + 1)
#define BIT(e) (1 << (e))

byte send_staging[4];      /* [rank][slot], on the sender */
byte slot[4], arrival[4];  /* [rank][slot], on the receiver */
byte consumed[4];          /* [rank][slot], on the sender */
byte payload_out[2], arrival_out[2], consumed_out[2]; /* in flight, by issuing rank: bit e is call e */

#ifdef NO_FENCE
#define AFTER_PAYLOAD(me, e) true /* put, then a signal: nothing orders them */
#else
#define AFTER_PAYLOAD(me, e) !(payload_out[me] & BIT(e)) /* put with signal */
#endif
#ifdef UNTAGGED
#define TAG(e) 1
#else
#define TAG(e) (e)
#endif

#define DELIVER(e)                                                                    \
  :: atomic { payload_out[me] & BIT(e) ->                                             \
              payload_out[me] = payload_out[me] & ~BIT(e);                            \
              slot[AT(1 - me, e)] = send_staging[AT(me, e)] }                         \
  :: atomic { (arrival_out[me] & BIT(e)) && AFTER_PAYLOAD(me, e) ->                   \
              arrival_out[me] = arrival_out[me] & ~BIT(e);                            \
              arrival[AT(1 - me, e)] = TAG(e) }                                       \
  :: atomic { consumed_out[me] & BIT(e) ->                                            \
              consumed_out[me] = consumed_out[me] & ~BIT(e);                          \
              consumed[AT(1 - me, e)] = e }

proctype wire(byte me)
{
end:
  do
  DELIVER(1) DELIVER(2) DELIVER(3)
  od
}

inline send(e)
{
#ifndef NO_CONSUMED
  e <= SLOTS || consumed[AT(me, e)] == e - SLOTS;
#endif
  d_step {
    send_staging[AT(me, e)] = ROWS(me, e);
    payload_out[me] = payload_out[me] | BIT(e);
    arrival_out[me] = arrival_out[me] | BIT(e)
  }
}

inline receive(e)
{
  arrival[AT(me, e)] == TAG(e);
  assert(slot[AT(me, e)] == ROWS(1 - me, e));
  atomic {
    assert(slot[AT(me, e)] == ROWS(1 - me, e)); /* still there when it has been expanded */
    consumed_out[me] = consumed_out[me] | BIT(e)
  }
}

proctype rank(byte me)
{
  send(1);
  send(2);
  receive(1);
  send(3);
  receive(2);
  receive(3)
}

init { atomic { run wire(0); run wire(1); run rank(0); run rank(1) } }
