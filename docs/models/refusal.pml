/* Calls that a rank refuses (docs/internode.md), as a model for spin.
 *
 * Two peers, five calls, each of which each rank takes part in or refuses. A refusal waits for nobody, but that a rank
 * does not run so far ahead that its record meets another of its own in the same slot. A call that somebody refuses
 * moves no rows; any other moves one row each way through a ring of one slot. The rings must stay in step whatever was
 * refused.
 *
 * A process `wire` a rank delivers what that rank has issued, in any order; a put with signal as a whole (dispatch.pml
 * shows that this is enough). Each #ifdef is a mistake.
 */
#define CALLS 5
#define DEPTH 4
/* Before a rank writes the record of call e it has seen the peer's of call e - AHEAD; which the peer has written after it
 * had seen that of e - 2 * AHEAD. So the last record in this slot has been delivered, also to a peer that refused. */
#ifdef LONG_LIMIT
#define AHEAD (DEPTH - 1)
#else
#define AHEAD (DEPTH / 2)
#endif
#define OTHER(me) (1 - (me))
#define AT(rank, e) ((rank) * DEPTH + (e) % DEPTH)
#define ROW(me, e) (10 * (e) + (me) + 1)
#define BIT(n) (1 << (n))
#define OUT(ops, n) (ops[me] & BIT(n))
#define DELIVERED(ops, n) ops[me] = ops[me] & ~BIT(n)

byte record_epoch[8], record_refused[8]; /* [rank][slot] on the reader */
byte out_refused[8];                     /* [rank][slot] on the writer: records being sent */
byte staging[2], ring[2], arrival[2], credit[2];
byte record_out[2], put_out[2], credit_out[2]; /* in flight, by issuing rank: bit n is call or chunk n */

#define DELIVER(n)                                                        \
  :: atomic { OUT(record_out, n) -> DELIVERED(record_out, n);             \
              record_refused[AT(OTHER(me), n)] = out_refused[AT(me, n)];  \
              record_epoch[AT(OTHER(me), n)] = n }                        \
  :: atomic { OUT(put_out, n) -> DELIVERED(put_out, n);                   \
              ring[OTHER(me)] = staging[me]; arrival[OTHER(me)] = n }     \
  :: atomic { OUT(credit_out, n) -> DELIVERED(credit_out, n);             \
              credit[OTHER(me)] = n }

proctype wire(byte me)
{
end:
  do
  DELIVER(1) DELIVER(2) DELIVER(3) DELIVER(4) DELIVER(5)
  od
}

inline send_row()
{
  sent++;
  credit[me] == sent - 1;
  d_step { staging[me] = ROW(me, e); put_out[me] = put_out[me] | BIT(sent) }
}

proctype rank(byte me)
{
  byte e, sent, taken;
  bool refuse;
  for (e : 1 .. CALLS) {
    if
    :: refuse = true
    :: refuse = false
    fi;
#ifndef NO_LIMIT
    e <= AHEAD || record_epoch[AT(me, e - AHEAD)] >= e - AHEAD;
#endif
    d_step { out_refused[AT(me, e)] = refuse; record_out[me] = record_out[me] | BIT(e) }
    if
    :: refuse
    :: else ->
#ifdef NO_GATE
       send_row();
#endif
       record_epoch[AT(me, e)] == e;
       if
       :: record_refused[AT(me, e)]
       :: else ->
#ifndef NO_GATE
          send_row();
#endif
          taken++;
          arrival[me] == taken;
          assert(ring[me] == ROW(OTHER(me), e));
          credit_out[me] = credit_out[me] | BIT(taken)
       fi
    fi
  }
}

init { atomic { run wire(0); run wire(1); run rank(0); run rank(1) } }
