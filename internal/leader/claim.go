package leader

import (
	"time"

	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// claim is what one process knows about the Lease, and the rules by which it acts on that. It is pure: the caller passes the time of
// its own clock, of which only differences count. Lock guards one, and model_test.go runs many against each other.
//
// The rules, as long as no clock runs twice as fast as another:
//
//   - A term is only taken by a write of the Lease that succeeds if the Lease has not changed since it was read, and it is higher than
//     that of the Lease as it was read. So two processes never have the same term, as long as the Lease is not deleted.
//   - A process certainly leads for certainAge after it began its last write that succeeded.
//   - A standby writes the Lease of a holder that has ended after it has read the same Lease for vacantAge, twice as long. Whatever
//     led it to assume that the holder has ended, a holder that still writes the Lease keeps it.
//   - Without that assumption a standby waits for the duration of the Lease, which is longer.
type claim struct {
	identity string

	term   int64     // of this process's last write; 0 if there was none
	wrote  time.Time // when this process began its last successful write
	floor  int64     // the lowest term that the next write may carry
	seen   int64     // the highest term that the Lease had
	holder string
	// lost is set once another process held the Lease after this one.
	lost bool

	renewal time.Time // of the Lease as it was read last, by the clock of its holder
	since   time.Time // when it was first read like that
	// ended is the holder that was last reported to have ended, at the time reported.
	ended    string
	reported time.Time
}

// leading returns the term under which this process leads, as far as it knows; 0 if it does not lead.
func (c *claim) leading() int64 {
	if c.term >= c.floor && c.holder == c.identity && !c.lost {
		return c.term
	}
	return 0
}

// superseded records that a term, which is not this process's, is in use. It returns false if that is outdated.
func (c *claim) superseded(term int64) bool {
	if term < max(c.term, c.floor) {
		return false
	}
	c.floor = term + 1
	return true
}

// next returns the term of a write that would carry term: it is not lower than any known term.
func (c *claim) next(term int64) int64 {
	if c.holder == c.identity { // a renewal
		return max(term, c.floor, c.term)
	}
	return max(term, c.floor, c.seen+1)
}

// observe records the content of the Lease, and reports whether there is another holder.
func (c *claim) observe(record *resourcelock.LeaderElectionRecord) bool {
	c.seen = max(c.seen, int64(record.LeaderTransitions)+1)
	holder := record.HolderIdentity
	if holder == c.holder {
		return false
	}
	c.holder = holder
	c.lost = c.lost || c.term > 0 && holder != "" && holder != c.identity
	return true
}

// read is observe for the Lease as it was read until now. Each write of it has another time of renewal, which is not compared with a clock.
func (c *claim) read(record *resourcelock.LeaderElectionRecord, now time.Time) bool {
	changed := c.observe(record)
	if changed || !record.RenewTime.Time.Equal(c.renewal) {
		c.renewal, c.since = record.RenewTime.Time, now
	}
	return changed
}

// wroteTerm records a write of this process that began at a time and succeeded, and reports whether it carries another term.
func (c *claim) wroteTerm(term int64, began time.Time) bool {
	c.wrote = began
	changed := term != c.term
	c.term = term
	return changed
}

// certain reports whether no other process can have written the Lease since this one did.
func (c *claim) certain(now time.Time, age time.Duration) bool { return now.Sub(c.wrote) < age }

// report records that the holder of the Lease seems to have ended.
func (c *claim) report(holder string, now time.Time) { c.ended, c.reported = holder, now }

// suspects reports whether another process holds the Lease and was reported to have ended, less than the given age ago.
func (c *claim) suspects(now time.Time, age time.Duration) bool {
	return c.holder != "" && c.holder != c.identity && c.holder == c.ended && now.Sub(c.reported) < age
}

// vacant reports whether this process may write the Lease although it has not expired: its holder is suspected and has not written it
// for the given age.
func (c *claim) vacant(now time.Time, age time.Duration) bool {
	return c.suspects(now, age) && now.Sub(c.since) >= age
}
