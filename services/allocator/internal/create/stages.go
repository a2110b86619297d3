package create

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

// stageTimer measures the stages of a strong create, each from the end of the one before, as this process sees them end.
type stageTimer struct {
	stages

	clock clock.PassiveClock
	last  time.Time
	next  int // of the stages that the sandbox itself shows
}

func newStageTimer(c clock.PassiveClock) *stageTimer { return &stageTimer{clock: c, last: c.Now()} }

// end ends a stage.
func (t *stageTimer) end(stage string) {
	now := t.clock.Now()
	t.add(stage, now.Sub(t.last))
	t.last = now
}

// observe ends the stages that a sandbox has left behind; done says that its custom resource says that it has started.
func (t *stageTimer) observe(sb *sandboxv1.Sandbox, uid string, done bool) {
	st := sb.GetStatus()
	for i, stage := range []struct {
		name string
		over bool
	}{
		{"schedule", st.GetAssignedPod() != ""},
		{"agent", st.GetStartTime() != nil || st.GetPhase() == sandboxv1.Phase_PHASE_RUNNING},
		{"status", done},
	} {
		if i == t.next && sb.GetUid() == uid && (stage.over || done) {
			t.end(stage.name)
			t.next++
		}
	}
}
