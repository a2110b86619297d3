package create

import (
	"slices"
	"time"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/stat"
)

// outside is the part of the client's time that no stage accounts for: the connection, the servers' interceptors and
// validation, and the client itself.
const outside = "outside"

// Breakdown collects where the time of one series went. One goroutine uses it.
type Breakdown struct {
	client []float64
	order  []string
	stages map[string][]float64
}

// NewBreakdown returns an empty one.
func NewBreakdown() *Breakdown { return &Breakdown{stages: map[string][]float64{}} }

// Add takes one create: what the client waited, and what the answer says of it, all of whose stages follow each other.
func (b *Breakdown) Add(client time.Duration, timings []*sandboxv1.StageTiming) {
	sums := map[string]time.Duration{}
	rest := client
	for _, t := range timings {
		sums[t.GetStage()] += t.GetDuration().AsDuration()
		rest -= t.GetDuration().AsDuration()
		if !slices.Contains(b.order, t.GetStage()) {
			b.order = append(b.order, t.GetStage())
		}
	}
	sums[outside] = rest
	for stage, d := range sums {
		b.stages[stage] = append(b.stages[stage], millis(d))
	}
	b.client = append(b.client, millis(client))
}

// Stage is one row of a breakdown: times in milliseconds, and the share of all of the clients' time.
type Stage struct {
	Name string
	// N is how many creates had the stage.
	N                int
	P50, Mean, Share float64
}

// Rows are the stages in their order, with what is outside of them last; over is the sum of their p50 over the client's.
func (b *Breakdown) Rows() (rows []Stage, over float64) {
	total := stat.Mean(b.client)
	sum := 0.0
	for _, name := range append(slices.Clone(b.order), outside) {
		samples := b.stages[name]
		s := Stage{name, len(samples), stat.Quantile(samples, 0.5), stat.Mean(samples), 0}
		s.Share = stat.Ratio(s.Mean*float64(s.N), total*float64(len(b.client)))
		// A stage that only some creates had weighs as often as it was had.
		sum += s.P50 * stat.Ratio(float64(s.N), float64(len(b.client)))
		rows = append(rows, s)
	}
	return rows, stat.Ratio(sum, stat.Quantile(b.client, 0.5))
}
