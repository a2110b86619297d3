package render_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestStarted(t *testing.T) {
	stage := func(name string, micros int) *sandboxv1.StageTiming {
		return &sandboxv1.StageTiming{Stage: name, Duration: durationpb.New(time.Duration(micros) * time.Microsecond)}
	}
	const slot, cold = sandboxv1.StartPath_START_PATH_SLOT, sandboxv1.StartPath_START_PATH_COLD
	claimed := []*sandboxv1.StageTiming{stage("reserve", 80), stage("agent", 440), stage("snapshot", 312), stage("claim", 1449)}
	for name, tc := range map[string]struct {
		out  *sandboxv1.CreateSandboxResponse
		took time.Duration
		want string
	}{
		"slot": {&sandboxv1.CreateSandboxResponse{StartPath: slot, Timings: claimed}, 6100 * time.Microsecond,
			"started in 6.1 ms (slot): reserve 0.08, agent 0.44, snapshot 0.31, claim 1.4, outside 3.8"},
		"cold": {&sandboxv1.CreateSandboxResponse{StartPath: cold, Timings: []*sandboxv1.StageTiming{stage("image", 1234567), stage("task", 53210)}}, 1290 * time.Millisecond,
			"started in 1290 ms (cold): image 1235, task 53.2, outside 2.2"},
		"different clocks": {&sandboxv1.CreateSandboxResponse{StartPath: slot, Timings: claimed}, 2 * time.Millisecond,
			"started in 2.0 ms (slot): reserve 0.08, agent 0.44, snapshot 0.31, claim 1.4"},
		"no timings": {&sandboxv1.CreateSandboxResponse{}, 60 * time.Millisecond, "started in 60.0 ms"},
		"repeated answer": {&sandboxv1.CreateSandboxResponse{StartPath: slot, Replayed: true, Timings: claimed}, 900 * time.Microsecond,
			"answered in 0.90 ms (slot)"},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, tc.want, render.Started(tc.out, tc.took)) })
	}
}
