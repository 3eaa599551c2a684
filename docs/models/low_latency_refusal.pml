/* Refused low-latency calls between nodes (docs/internode.md), as a model for spin.
 *
 * Two ranks, two slots, five calls one after another, each refused by either rank or not. Who refuses, and who leaves a
 * call because its peer has refused, has not answered the peer's message. Before it uses the slot again it takes that
 * message, unread, and answers. All words are tested for equality, so an older signal that lands late is a deadlock.
 *
 * A process `wire` a rank delivers what that rank has issued, in any order but for data before its signal. Each #ifdef
 * is a mistake.
 */
#define SLOTS 2
#define AT(rank, e) ((rank) * SLOTS + (e) % SLOTS)
#define ROWS(rank, e) (10 * (e) + (rank) + 1)
#define REFUSED 100
#define BIT(e) (1 << (e))

byte out[4];              /* [rank][slot], on the sender: what is being put */
byte slot[4], arrival[4]; /* [rank][slot], on the receiver */
byte consumed[4];         /* [rank][slot], on the sender */
bool owed[4];             /* [rank][slot], the rank has not answered the slot's last call */
byte data_out[2], arrival_out[2], consumed_out[2]; /* in flight, by issuing rank: bit e is call e */

#define DELIVER(e)                                                            \
  :: atomic { data_out[me] & BIT(e) ->                                        \
              data_out[me] = data_out[me] & ~BIT(e);                          \
              slot[AT(1 - me, e)] = out[AT(me, e)] }                          \
  :: atomic { (arrival_out[me] & BIT(e)) && !(data_out[me] & BIT(e)) ->       \
              arrival_out[me] = arrival_out[me] & ~BIT(e);                    \
              arrival[AT(1 - me, e)] = e }                                    \
  :: atomic { consumed_out[me] & BIT(e) ->                                    \
              consumed_out[me] = consumed_out[me] & ~BIT(e);                  \
              consumed[AT(1 - me, e)] = e }

proctype wire(byte me)
{
end:
  do
  DELIVER(1) DELIVER(2) DELIVER(3) DELIVER(4) DELIVER(5)
  od
}

inline answer(e) { consumed_out[me] = consumed_out[me] | BIT(e) }

inline begin(e) /* P1 */
{
  if
  :: e > SLOTS ->
#ifndef NO_ANSWER
     if
     :: owed[AT(me, e)] ->
#ifndef EARLY_ANSWER
        arrival[AT(me, e)] == e - SLOTS;
#endif
        answer(e - SLOTS)
     :: else
     fi;
#endif
#ifndef NO_CONSUMED
     consumed[AT(me, e)] == e - SLOTS
#else
     skip
#endif
  :: else
  fi
}

inline put(e, what) /* P2, P3 */
{
  d_step {
    out[AT(me, e)] = what;
    data_out[me] = data_out[me] | BIT(e);
    arrival_out[me] = arrival_out[me] | BIT(e);
    owed[AT(me, e)] = true
  }
}

inline receive(e) /* P4, P5 */
{
  arrival[AT(me, e)] == e;
  if
  :: slot[AT(me, e)] == REFUSED -> skip /* leave */
  :: else ->
     assert(slot[AT(me, e)] == ROWS(1 - me, e));
     atomic {
       assert(slot[AT(me, e)] == ROWS(1 - me, e)); /* still there when it has been read */
       answer(e);
       owed[AT(me, e)] = false
     }
  fi
}

inline call(e)
{
  begin(e);
  if
  :: put(e, ROWS(me, e)); receive(e)
  :: put(e, REFUSED)
  fi
}

proctype rank(byte me)
{
  call(1);
  call(2);
  call(3);
  call(4);
  call(5)
}

init { atomic { run wire(0); run wire(1); run rank(0); run rank(1) } }
