package fleet_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
)

// TestKeptReports: a report of a persisted sandbox is kept as it was sent, whatever it has and lacks.
func TestKeptReports(t *testing.T) {
	for name, change := range map[string]func(*agentv1.SandboxReport){
		"nothing":          func(*agentv1.SandboxReport) {},
		"a container's id": func(r *agentv1.SandboxReport) { r.ContainerId = "u1-1" },
		"another id":       func(r *agentv1.SandboxReport) { r.ContainerId = "container" },
		"an endpoint":      func(r *agentv1.SandboxReport) { r.ContainerId, r.Endpoints = "u1-1", []string{"10.0.0.1:80"} },
		"endpoints":        func(r *agentv1.SandboxReport) { r.Endpoints = []string{"10.0.0.1:80", "", "10.0.0.1:8080"} },
		"no endpoints":     func(r *agentv1.SandboxReport) { r.Endpoints = []string{} },
		"times":            func(r *agentv1.SandboxReport) { r.StartTime, r.FinishTime = at(1), at(2); r.Record.CreateTime = at(3) },
		"a zero time":      func(r *agentv1.SandboxReport) { r.StartTime = &timestamppb.Timestamp{} },
		"an exit code":     func(r *agentv1.SandboxReport) { r.ExitCode, r.Reason, r.Message = proto.Int32(0), "Ended", "it ended" },
		"another name":     func(r *agentv1.SandboxReport) { r.Record.Name = "two" },
	} {
		t.Run(name, func(t *testing.T) {
			f, _, _ := newFleet()
			f.Joined(info(0), "10.0.0.1:1")
			sent := report("u1", running, true)
			change(sent)
			want := proto.CloneOf(sent)
			want.Record.Spec = nil
			f.Snapshot("a", &agentv1.AgentSnapshot{Info: info(5), Accepting: true, Sandboxes: []*agentv1.SandboxReport{sent}})
			proto.Reset(sent)
			initial, w := f.Watch("", "")
			defer w.Close()
			require.Len(t, initial[0].GetSandboxes(), 1)
			require.True(t, proto.Equal(want, initial[0].GetSandboxes()[0]), "%v", initial[0].GetSandboxes()[0])
		})
	}
}

func at(seconds int64) *timestamppb.Timestamp { return timestamppb.New(time.Unix(seconds, 5)) }
