package fastpath

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"k8s.io/utils/clock"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

// stages collects how long the stages of a create took.
type stages []*sandboxv1.StageTiming

func (t *stages) add(stage string, d time.Duration) {
	*t = append(*t, &sandboxv1.StageTiming{Stage: stage, Duration: durationpb.New(max(d, 0))})
}

// laps are the stages of a strong create, each measured from the end of the one before, as this process sees them end.
type laps struct {
	stages

	clock clock.PassiveClock
	last  time.Time
	next  int // of the stages that a sandbox itself tells of
}

func newLaps(c clock.PassiveClock) *laps { return &laps{clock: c, last: c.Now()} }

func (l *laps) lap(stage string) {
	now := l.clock.Now()
	l.add(stage, now.Sub(l.last))
	l.last = now
}

// see notes the stages that a sandbox has left behind; done tells that the custom resource says that it has started.
func (l *laps) see(sb *sandboxv1.Sandbox, uid string, done bool) {
	st := sb.GetStatus()
	for i, stage := range []struct {
		name string
		over bool
	}{
		{"schedule", st.GetAssignedPod() != ""},
		{"agent", st.GetStartTime() != nil || st.GetPhase() == sandboxv1.Phase_PHASE_RUNNING},
		{"status", done},
	} {
		if i == l.next && sb.GetUid() == uid && (stage.over || done) {
			l.lap(stage.name)
			l.next++
		}
	}
}
