package leader

import (
	"container/heap"
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

var (
	modelSeed = flag.Uint64("model-seed", 1, "first `seed` of TestModel")
	modelRuns = flag.Uint64("model-runs", 400, "`number` of seeds of TestModel")
)

// TestModel runs the rules of claim for several processes, with one Lease and one agent, through schedules that a seed determines:
// clocks that are wrong and run at different rates, messages that are late or lost, processes that stop for longer than the Lease lasts
// and continue with what they knew, calls to the agent that arrive long after they were sent, and suspicions that are wrong. It checks
// at every moment of true time:
//
//   - a term has one holder;
//   - a process that is certain that it leads is the one that wrote the Lease last, so there is no second one;
//   - the agent executes no call of a lower term after one of a higher, so a leader that was superseded changes nothing;
//   - terms increase.
//
// A failure names its seed: go test ./internal/leader -run TestModel -model-seed N -model-runs 1 -v prints the schedule.
func TestModel(t *testing.T) {
	var sum tally
	for seed := *modelSeed; seed < *modelSeed+*modelRuns; seed++ {
		m := newModel(seed)
		m.log = func(format string, args ...any) {
			if *modelRuns == 1 {
				t.Logf("%12s  %s", m.now.Round(time.Microsecond), fmt.Sprintf(format, args...))
			}
		}
		m.run()
		require.Empty(t, m.problems, "seed %d", seed)
		sum.add(m.tally)
	}
	t.Logf("%+v", sum)
	// A model in which nothing happens proves nothing.
	require.Greater(t, sum.terms, *modelRuns)
	for what, n := range map[string]uint64{
		"acquired although the Lease had not expired": sum.vacancies, "wrong suspicions that the holder survived": sum.survived,
		"certain": sum.certain, "refused by the agent": sum.refused, "conflicts": sum.conflicts,
	} {
		require.True(t, n > 0 || *modelRuns < 100, what)
	}
}

// TestModelFinds: the model is strict enough to notice a protocol that is wrong.
func TestModelFinds(t *testing.T) {
	for name, change := range map[string]func(*model){
		"a standby that waits no longer than a leader is certain": func(m *model) { m.vacantAge = m.certainAge / 2 },
		"a store without versions":                                func(m *model) { m.blind = true },
		"a leader that is certain for the duration of the Lease":  func(m *model) { m.certainAge = m.timing.LeaseDuration },
		"an agent that accepts every term":                        func(m *model) { m.gullible = true },
	} {
		t.Run(name, func(t *testing.T) {
			for seed := uint64(1); seed < 2000; seed++ {
				m := newModel(seed)
				change(m)
				if m.run(); len(m.problems) > 0 {
					return
				}
			}
			t.Fatal("the model did not notice")
		})
	}
}

// tally counts what happened.
type tally struct {
	terms, vacancies, survived, certain, refused, accepted, conflicts uint64
}

func (t *tally) add(o tally) {
	t.terms += o.terms
	t.vacancies += o.vacancies
	t.survived += o.survived
	t.certain += o.certain
	t.refused += o.refused
	t.accepted += o.accepted
	t.conflicts += o.conflicts
}

// model is one schedule. Time is true time; each process reads it by a clock of its own.
type model struct {
	random                *rand.Rand
	timing                Timing
	certainAge, vacantAge time.Duration
	blind, gullible       bool

	now    time.Duration
	queue  events
	serial int
	log    func(format string, args ...any)

	// The Lease.
	version int
	lease   *resourcelock.LeaderElectionRecord

	candidates []*candidate
	owners     map[int64]string // by term
	agentTerm  int64

	problems []string
	tally    tally
}

// candidate is one process.
type candidate struct {
	model  *model
	name   string
	claim  claim
	offset time.Duration // of its clock
	rate   float64       // of its clock
	paused time.Duration // until when it does nothing
	fault  float64       // probability that a message is late or lost

	version int       // of the Lease as it was read
	read    time.Time // its time of renewal
	expiry  time.Time // of the Lease as it was read, by this process's clock
}

func newModel(seed uint64) *model {
	m := &model{
		random: rand.New(rand.NewPCG(seed, 17)), timing: DefaultTiming(), owners: map[int64]string{},
		log: func(string, ...any) {},
	}
	m.certainAge, m.vacantAge = m.timing.certainAge(), m.timing.vacantAge()
	fault := []float64{0, 0.02, 0.3}[m.random.IntN(3)]
	for i := range 2 + m.random.IntN(3) {
		c := &candidate{model: m, name: string(rune('a' + i)), fault: fault,
			offset: time.Duration(m.random.Int64N(int64(2*time.Hour))) - time.Hour, rate: 0.75 + m.random.Float64()/2}
		c.claim.identity = c.name
		m.candidates = append(m.candidates, c)
		c.after(m.spread(time.Second), c.poll)
	}
	m.at(m.spread(time.Second), m.disturb)
	return m
}

// run runs two minutes.
func (m *model) run() {
	for m.queue.Len() > 0 && len(m.problems) == 0 {
		e := heap.Pop(&m.queue).(*event)
		if e.at > 2*time.Minute {
			return
		}
		m.now = e.at
		e.do()
	}
}

// disturb has something happen to a process: a pause, or a suspicion, which may be wrong and lasts a while.
func (m *model) disturb() {
	m.at(m.spread(3*time.Second), m.disturb)
	c := m.candidates[m.random.IntN(len(m.candidates))]
	switch m.random.IntN(3) {
	case 0:
		length := m.spread([]time.Duration{100 * time.Millisecond, time.Second, 15 * time.Second}[m.random.IntN(3)])
		c.paused = max(c.paused, m.now+length)
		m.log("%s is paused for %s", c.name, length)
	default:
		if m.lease == nil {
			return
		}
		suspect, until := m.lease.HolderIdentity, m.now+m.spread(5*time.Second)
		m.log("%s is suspected", suspect)
		for _, c := range m.candidates {
			m.suspect(c, suspect, until)
		}
	}
}

// suspect repeats a suspicion as the liveness check of a standby does, which then reads the Lease often.
func (m *model) suspect(c *candidate, holder string, until time.Duration) {
	if m.now > until {
		if m.lease.HolderIdentity == holder {
			m.tally.survived++
		}
		return
	}
	c.after(0, func() {
		c.claim.report(holder, c.clock())
		if c.claim.suspects(c.clock(), m.vacantAge) {
			c.get()
		}
	})
	m.at(100*time.Millisecond, func() { m.suspect(c, holder, until) })
}

func (m *model) spread(d time.Duration) time.Duration {
	return time.Duration(m.random.Int64N(int64(d)))
}

func (m *model) at(delay time.Duration, do func()) {
	m.serial++
	heap.Push(&m.queue, &event{m.now + delay, m.serial, do})
}

func (m *model) check(ok bool, format string, args ...any) {
	if !ok {
		m.problems = append(m.problems, fmt.Sprintf("after %s: ", m.now)+fmt.Sprintf(format, args...))
	}
}

// clock is the time as the process reads it.
func (c *candidate) clock() time.Time {
	return time.Unix(0, 0).Add(c.offset + time.Duration(float64(c.model.now)*c.rate))
}

// after has the process do something after a time of true time, but not while it is paused.
func (c *candidate) after(delay time.Duration, do func()) {
	c.model.at(delay, func() {
		if c.paused > c.model.now {
			c.after(c.paused-c.model.now, do)
			return
		}
		do()
	})
}

// message delivers a message between the process and the API server, or the agent; it may be late, or lost.
func (c *candidate) message(deliver func()) {
	m := c.model
	delay := time.Millisecond + m.spread(5*time.Millisecond)
	if m.random.Float64() < c.fault {
		if m.random.IntN(2) == 0 {
			return
		}
		delay += m.spread(8 * time.Second)
	}
	m.at(delay, deliver)
}

// poll is one attempt to acquire or renew the Lease; the next begins after the period, even if this one has no answer.
func (c *candidate) poll() {
	m := c.model
	period := m.timing.RetryPeriod
	if c.claim.leading() == 0 {
		period += m.spread(period * 6 / 5)
	}
	c.after(time.Duration(float64(period)/c.rate), c.poll)
	c.get()
	c.act()
}

// get reads the Lease and then writes it if the rules allow it.
func (c *candidate) get() {
	m := c.model
	c.message(func() { // it has reached the API server
		version := m.version
		var record *resourcelock.LeaderElectionRecord
		if m.lease != nil {
			copied := *m.lease
			record = &copied
		}
		c.message(func() { c.after(0, func() { c.got(version, record) }) })
	})
}

// got is client-go's tryAcquireOrRenew with Lock's Get.
func (c *candidate) got(version int, record *resourcelock.LeaderElectionRecord) {
	m := c.model
	if version < c.version { // calls of one elector follow each other
		return
	}
	now := c.clock()
	transitions := 0
	if record != nil {
		c.claim.read(record, now)
		if !record.RenewTime.Time.Equal(c.read) {
			c.read, c.expiry = record.RenewTime.Time, now.Add(m.timing.LeaseDuration)
		}
		ours := record.HolderIdentity == c.name
		transitions = record.LeaderTransitions
		if c.claim.lost {
			return // its program starts again; what it has sent is still on the way
		}
		vacant := c.claim.vacant(now, m.vacantAge)
		if !ours && !vacant && record.HolderIdentity != "" && c.expiry.After(now) {
			return
		}
		if !ours {
			transitions++
		}
		if !ours && c.expiry.After(now) {
			m.log("%s finds the Lease of %s vacant", c.name, record.HolderIdentity)
		}
	}
	c.version = version
	c.write(version, transitions, record != nil && record.HolderIdentity != c.name && c.expiry.After(now))
}

// write is Lock's write.
func (c *candidate) write(version, transitions int, early bool) {
	m := c.model
	term := c.claim.next(int64(transitions) + 1)
	began := c.clock()
	c.message(func() { // it has reached the API server
		if m.version != version && !m.blind {
			m.tally.conflicts++
			return
		}
		owner := m.owners[term]
		m.check(owner == "" || owner == c.name, "term %d of %s is taken by %s", term, owner, c.name)
		if m.lease != nil {
			was := int64(m.lease.LeaderTransitions) + 1
			m.check(term > was || term == was && m.lease.HolderIdentity == c.name, "term %d of %s follows %d of %s", term, c.name, was, m.lease.HolderIdentity)
		}
		if owner == "" {
			m.tally.terms++
			if early {
				m.tally.vacancies++
			}
			m.log("%s holds the Lease under term %d", c.name, term)
		}
		m.owners[term] = c.name
		m.version++
		after := m.version
		m.lease = &resourcelock.LeaderElectionRecord{HolderIdentity: c.name, LeaderTransitions: int(term - 1), RenewTime: metav1.NewTime(began)}
		record := *m.lease
		c.message(func() { // the answer has reached the process
			c.after(0, func() {
				if after > c.version {
					c.version = after
					c.claim.wroteTerm(term, began)
					c.claim.observe(&record)
					c.act()
				}
			})
		})
	})
}

// act is what a process does that leads as far as it knows: it answers for itself if it is certain, and calls the agent.
func (c *candidate) act() {
	m := c.model
	term := c.claim.leading()
	if term == 0 {
		return
	}
	if c.claim.certain(c.clock(), m.certainAge) {
		m.tally.certain++
		m.check(m.lease.HolderIdentity == c.name && int64(m.lease.LeaderTransitions)+1 == term,
			"%s is certain that it leads under term %d; %s leads under %d", c.name, term, m.lease.HolderIdentity, m.lease.LeaderTransitions+1)
	}
	c.message(func() { // it has reached the agent
		if term < m.agentTerm {
			m.tally.refused++
			if !m.gullible {
				known := m.agentTerm
				c.message(func() { c.after(0, func() { c.claim.superseded(known) }) })
				return
			}
		}
		m.check(term >= m.agentTerm, "the agent executes a call of term %d of %s after one of %d", term, c.name, m.agentTerm)
		m.tally.accepted++
		m.agentTerm = max(m.agentTerm, term)
	})
	c.after(m.spread(200*time.Millisecond), c.again(term))
}

// again acts once more, if it is still the same leadership.
func (c *candidate) again(term int64) func() {
	return func() {
		if c.claim.leading() == term && c.model.random.IntN(3) > 0 {
			c.act()
		}
	}
}

// event is something that happens at a time.
type event struct {
	at     time.Duration
	serial int
	do     func()
}

type events []*event

func (q events) Len() int { return len(q) }
func (q events) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].serial < q[j].serial
}
func (q events) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *events) Push(x any)   { *q = append(*q, x.(*event)) }
func (q *events) Pop() any {
	old := *q
	last := old[len(old)-1]
	*q = old[:len(old)-1]
	return last
}
