package run

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/audit"
)

// Report is what a run says: one JSON object.
type Report struct {
	Seed            uint64  `json:"seed"`
	DurationSeconds float64 `json:"duration_s"`
	CreatesAcked    int     `json:"creates_acked"`
	CreatesRefused  int     `json:"creates_refused"`
	// CreatesUnclear had no answer and were deleted by name.
	CreatesUnclear int `json:"creates_unclear"`
	DeletesAcked   int `json:"deletes_acked"`
	// DeletesDenied were carried out and answered with SANDBOX_NOT_FOUND.
	DeletesDenied  int            `json:"deletes_denied"`
	UpdatesAcked   int            `json:"updates_acked"`
	UpdatesRefused int            `json:"updates_refused"`
	Refusals       map[string]int `json:"refusals"`
	// Repeated is how many calls had to be sent more than once; InternalErrors how many answers said INTERNAL.
	Repeated       int `json:"repeated"`
	InternalErrors int `json:"internal_errors"`
	// Faults were carried out; Missed found nothing to hit.
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
	// OrphansOfGoneAgents are containers of agent Pods that were killed, which wait for a janitor; LostWithAgent are
	// sandboxes whose only durable record went with such a Pod.
	OrphansOfGoneAgents int `json:"orphans_of_gone_agents"`
	LostWithAgent       int `json:"lost_with_agent"`
	// Audited is how many sandboxes had a custom resource at the first audit, and how many containers ran.
	Audited       int     `json:"audited"`
	Running       int     `json:"running_at_audit"`
	SettleSeconds float64 `json:"settle_s"`
	EmptySeconds  float64 `json:"empty_s"`

	verdicts []audit.Verdict
}

// Good tells that every promise was kept.
func (r *Report) Good() bool {
	return r.Lost == 0 && r.Leaked == 0 && r.Duplicated == 0 && r.Stuck == 0
}

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

// take adds a verdict.
func (r *Report) take(v audit.Verdict) {
	r.verdicts = append(r.verdicts, v)
	r.Lost = audit.Count(audit.Lost, r.verdicts...)
	r.Leaked = audit.Count(audit.Leaked, r.verdicts...)
	r.Duplicated = audit.Count(audit.Duplicated, r.verdicts...)
	r.Stuck = audit.Count(audit.Stuck, r.verdicts...)
	r.OrphansOfGoneAgents = len(v.Orphans)
	r.DeletesDenied = max(r.DeletesDenied, len(v.Denied))
	slices.Sort(v.LostWithAgent)
	r.LostWithAgent = max(r.LostWithAgent, len(slices.Compact(v.LostWithAgent)))
}

// saw adds what was there to be audited.
func (r *Report) saw(obs audit.Observations) {
	r.Audited = len(obs.Resources)
	for _, c := range obs.Containers {
		if c.Running {
			r.Running++
		}
	}
}

// count adds what the clients' log says.
func (h *harness) count(r *Report) {
	lives, deleted := map[int]audit.Outcome{}, map[int]bool{}
	for _, c := range h.runner.Log.Calls() {
		if c.Tries > 1 {
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
			r.CreatesUnclear++
		}
	}
	log := h.runner.Log
	r.InternalErrors = log.Internal()
	r.P50Millis = float64(log.Quantile(0.5).Microseconds()) / 1000
	r.P99Millis = float64(log.Quantile(0.99).Microseconds()) / 1000
	r.WorstMillis = float64(log.Quantile(1).Microseconds()) / 1000
}

// writeLog keeps the log for whoever wants to know more.
func (h *harness) writeLog() error {
	if h.LogFile == "" {
		return nil
	}
	f, err := os.Create(h.LogFile)
	if err != nil {
		return fmt.Errorf("keeping the log: %w", err)
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
