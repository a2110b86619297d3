package run

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/audit"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/inside"
)

// Report is the result of a run: one JSON object.
type Report struct {
	Seed            uint64  `json:"seed"`
	DurationSeconds float64 `json:"duration_s"`
	CreatesAcked    int     `json:"creates_acked"`
	CreatesRefused  int     `json:"creates_refused"`
	// CreatesUnknown had no answer and were deleted by name.
	CreatesUnknown int `json:"creates_unknown"`
	DeletesAcked   int `json:"deletes_acked"`
	// DeletesDenied were executed and answered with SANDBOX_NOT_FOUND.
	DeletesDenied  int            `json:"deletes_denied"`
	UpdatesAcked   int            `json:"updates_acked"`
	UpdatesRefused int            `json:"updates_refused"`
	Refusals       map[string]int `json:"refusals"`
	// Repeated is how many calls had to be sent more than once; InternalErrors how many answers said INTERNAL.
	Repeated       int `json:"repeated"`
	InternalErrors int `json:"internal_errors"`
	// Faults were injected; Missed found no target.
	Faults      int            `json:"faults"`
	FaultsBy    map[string]int `json:"faults_by_kind"`
	Missed      int            `json:"faults_missed"`
	Lost        int            `json:"lost"`
	Leaked      int            `json:"leaked"`
	Duplicated  int            `json:"duplicated"`
	Stuck       int            `json:"stuck"`
	P50Millis   float64        `json:"p50_ms_under_faults"`
	P99Millis   float64        `json:"p99_ms_under_faults"`
	WorstMillis float64        `json:"max_ms_under_faults"`
	// OrphansDeleted were left by killed agents and deleted by the janitor between two observations; OrphansLeft is how many it
	// did not delete (they are also counted as leaked). GarbageDeleted is the number of dependents that the garbage collector deleted.
	OrphansDeleted int `json:"orphans_deleted"`
	OrphansLeft    int `json:"orphans_left"`
	GarbageDeleted int `json:"garbage_deleted"`
	// LostWithAgent are sandboxes whose only durable record was lost with a killed agent.
	LostWithAgent int `json:"lost_with_agent"`
	// PhaseSeconds is what all acknowledged creates together spent their time on, and SlowCreates has the phases of each that
	// took longer than a second, the slowest first.
	PhaseSeconds map[string]float64 `json:"create_phases_s"`
	SlowCreates  []SlowCreate       `json:"slow_creates"`
	// Audited is the number of sandboxes with a custom resource at the first audit, Running that of running containers.
	Audited       int     `json:"audited"`
	Running       int     `json:"running_at_audit"`
	SettleSeconds float64 `json:"settle_s"`
	EmptySeconds  float64 `json:"empty_s"`

	// Inside is what commands and files in sandboxes showed meanwhile.
	Inside inside.Result `json:"inside"`

	verdicts []audit.Verdict
}

// Good reports whether every promise was kept.
func (r *Report) Good() bool {
	return r.Lost == 0 && r.Leaked == 0 && r.Duplicated == 0 && r.Stuck == 0 && len(r.Inside.Broken) == 0
}

// Broken lists the broken promises, a line each.
func (r *Report) Broken() []string {
	var lines []string
	for _, v := range r.verdicts {
		for _, x := range v.Violations {
			lines = append(lines, fmt.Sprintf("%s: life %d, %s: %s", x.Kind, x.Life, x.Subject, x.What))
		}
	}
	return append(lines, r.Inside.Broken...)
}

// SlowCreate is an acknowledged create that took long, and what it waited for.
type SlowCreate struct {
	Name   string  `json:"name"`
	Millis float64 `json:"ms"`
	// LateMillis is the time from when the plan had it due until it was sent.
	LateMillis float64       `json:"late_ms,omitempty"`
	Phases     []audit.Phase `json:"phases"`
	// Faults are those that began or lasted while it waited, or ended shortly before.
	Faults []string `json:"faults,omitempty"`
}

// slow is the latency above which a create is reported with its phases.
const slow = time.Second

// aftermath is how long after a fault a create is reported with it: a standby takes over, a component starts again.
const aftermath = 10 * time.Second

// creates adds the phases of acknowledged creates. Of two requests for one sandbox the first answer counts.
func (r *Report) creates(calls []audit.Call, strikes []audit.Strike) {
	r.PhaseSeconds = map[string]float64{}
	for _, c := range calls {
		if c.Op != audit.Create || c.Outcome != audit.Acked {
			continue
		}
		for _, p := range c.Phases {
			r.PhaseSeconds[p.Name] += p.Millis / 1000
		}
		took := c.Answered.Sub(c.Due)
		if took <= slow {
			continue
		}
		s := SlowCreate{Name: c.Name, Millis: millis(took), LateMillis: millis(c.Sent.Sub(c.Due)), Phases: c.Phases}
		for _, f := range strikes {
			if f.Failed == "" && f.At.Before(c.Answered) && f.At.Add(f.Lasted+aftermath).After(c.Due) {
				s.Faults = append(s.Faults, f.Kind+" "+f.Target)
			}
		}
		r.SlowCreates = append(r.SlowCreates, s)
	}
	slices.SortStableFunc(r.SlowCreates, func(a, b SlowCreate) int { return cmp.Compare(b.Millis, a.Millis) })
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// String is the JSON.
func (r *Report) String() string {
	raw, err := json.Marshal(r)
	if err != nil { // numbers always marshal
		panic(err)
	}
	return string(raw)
}

func (h *harness) newReport() *Report {
	r := &Report{Seed: h.Plan.Seed, DurationSeconds: h.Plan.Duration.Seconds(), FaultsBy: map[string]int{}, Refusals: map[string]int{}}
	for _, s := range h.strikes {
		if s.Failed != "" {
			r.Missed++
			continue
		}
		r.Faults++
		r.FaultsBy[s.Kind]++
	}
	return r
}

// add adds a verdict.
func (r *Report) add(v audit.Verdict) {
	r.verdicts = append(r.verdicts, v)
	r.Lost = audit.Count(audit.Lost, r.verdicts...)
	r.Leaked = audit.Count(audit.Leaked, r.verdicts...)
	r.Duplicated = audit.Count(audit.Duplicated, r.verdicts...)
	r.Stuck = audit.Count(audit.Stuck, r.verdicts...)
	r.OrphansLeft = len(v.Orphans)
	r.DeletesDenied = max(r.DeletesDenied, len(v.Denied))
	slices.Sort(v.LostWithAgent)
	r.LostWithAgent = max(r.LostWithAgent, len(slices.Compact(v.LostWithAgent)))
}

// audited adds the amount of what was audited.
func (r *Report) audited(obs audit.Observations) {
	r.Audited = len(obs.Resources)
	for _, c := range obs.Containers {
		if c.Running {
			r.Running++
		}
	}
}

// count adds the clients' log.
func (h *harness) count(r *Report) {
	lives, deleted := map[int]audit.Outcome{}, map[int]bool{}
	for _, c := range h.runner.Log.Calls() {
		if c.Requests > 1 {
			r.Repeated++
		}
		if c.Outcome == audit.Refused {
			r.Refusals[string(c.Op)+" "+c.Reason]++
		}
		switch {
		case c.Op == audit.Create && lives[c.Life] != audit.Acked:
			lives[c.Life] = c.Outcome
		case c.Op == audit.Delete && c.Outcome == audit.Acked && !deleted[c.Life]:
			deleted[c.Life] = true
			r.DeletesAcked++
		case c.Op == audit.Update && c.Outcome == audit.Acked:
			r.UpdatesAcked++
		case c.Op == audit.Update:
			r.UpdatesRefused++
		}
	}
	for _, outcome := range lives {
		switch outcome {
		case audit.Acked:
			r.CreatesAcked++
		case audit.Refused:
			r.CreatesRefused++
		case audit.Unknown:
			r.CreatesUnknown++
		}
	}
	log := h.runner.Log
	r.InternalErrors = log.Internal()
	r.P50Millis, r.P99Millis, r.WorstMillis = millis(log.Quantile(0.5)), millis(log.Quantile(0.99)), millis(log.Quantile(1))
	r.creates(log.Calls(), h.strikes)
}

// writeLog writes the whole log to the file that the options name.
func (h *harness) writeLog() error {
	if h.LogFile == "" {
		return nil
	}
	f, err := os.Create(h.LogFile)
	if err != nil {
		return fmt.Errorf("writing the log: %w", err)
	}
	encoder := json.NewEncoder(f)
	for _, c := range h.runner.Log.Calls() {
		_ = encoder.Encode(c)
	}
	for _, s := range h.strikes {
		_ = encoder.Encode(s)
	}
	return f.Close()
}
