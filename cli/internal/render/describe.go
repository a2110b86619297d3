package render

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

// description is a list of `Key:  value` lines.
type description struct {
	keys, values []string
	now          time.Time
}

func (d *description) add(key, value string) {
	if value == "" {
		value = None
	}
	d.keys, d.values = append(d.keys, key+":"), append(d.values, value)
}

func (d *description) optional(key, value string) {
	if value != "" {
		d.add(key, value)
	}
}

func (d *description) time(key string, t *timestamppb.Timestamp) {
	if t == nil {
		return
	}
	at, relative := t.AsTime(), ""
	if at.After(d.now) {
		relative = "in " + Age(d.now, at)
	} else {
		relative = Age(at, d.now) + " ago"
	}
	d.add(key, fmt.Sprintf("%s (%s)", at.UTC().Format(time.RFC3339), relative))
}

// Describe writes a sandbox in detail, for people.
func Describe(w io.Writer, s *sandboxv1.Sandbox, now time.Time) error {
	d := &description{now: now}
	spec, st := s.GetSpec(), s.GetStatus()
	d.add("Name", s.GetName())
	d.add("Namespace", s.GetNamespace())
	d.add("UID", s.GetUid())
	d.add("Labels", pairs(s.GetLabels()))
	d.time("Created", s.GetCreateTime())
	d.time("Deleted", s.GetDeleteTime())
	d.add("Phase", PhaseWord(s))
	d.optional("Message", st.GetMessage())
	d.optional("Exit Code", Exit(st))
	d.add("Image", spec.GetImage())
	d.optional("Command", quoted(spec.GetCommand()))
	d.optional("Args", quoted(spec.GetArgs()))
	if spec.GetKeepAlive() {
		d.add("Keep Alive", "true")
	}
	d.optional("Working Dir", spec.GetWorkingDir())
	d.optional("Environment", pairs(spec.GetEnv()))
	d.optional("Limits", limits(spec.GetResources()))
	d.optional("Network", word(spec.GetNetwork().String(), "NETWORK_MODE_"))
	d.optional("Consistency", word(spec.GetConsistencyMode().String(), "CONSISTENCY_MODE_"))
	d.optional("Failure Policy", word(spec.GetFailurePolicy().String(), "FAILURE_POLICY_"))
	d.time("Expires", spec.GetExpireTime())
	d.optional("Grace Period", period(spec.GetTerminationGracePeriod()))
	d.optional("TTL Finished", period(spec.GetTtlAfterFinished()))
	d.add("Pool", spec.GetPool())
	d.add("Agent", st.GetAssignedPod())
	d.add("Node", st.GetNodeName())
	d.add("Container", st.GetSandboxId())
	d.add("Attempt", fmt.Sprint(st.GetAttempt()))
	d.add("Endpoints", strings.Join(st.GetEndpoints(), ", "))
	d.add("Persisted", fmt.Sprint(st.GetPersisted()))
	d.optional("Start Path", StartPath(st.GetStartPath()))
	d.time("Started", st.GetStartTime())
	d.time("Finished", st.GetFinishTime())
	if err := d.write(w); err != nil {
		return err
	}
	return conditions(w, st.GetConditions(), now)
}

func (d *description) write(w io.Writer) error {
	t := &Table{widths: make([]int, 2)}
	for i, key := range d.keys {
		t.Add(key, d.values[i])
	}
	return t.Flush(w)
}

func conditions(w io.Writer, list []*sandboxv1.Condition, now time.Time) error {
	if len(list) == 0 {
		return nil
	}
	if _, err := fmt.Fprintln(w, "Conditions:"); err != nil {
		return err
	}
	t := NewTable("  TYPE", "STATUS", "SINCE", "REASON", "MESSAGE")
	for _, c := range list {
		t.Add("  "+c.GetType(), c.GetStatus(), Age(c.GetLastTransitionTime().AsTime(), now), c.GetReason(), c.GetMessage())
	}
	return t.Flush(w)
}

// period returns a duration; empty if it is not set.
func period(d *durationpb.Duration) string {
	if d == nil {
		return ""
	}
	return d.AsDuration().String()
}

func pairs(m map[string]string) string {
	out := make([]string, 0, len(m))
	for _, k := range slices.Sorted(maps.Keys(m)) {
		out = append(out, k+"="+m[k])
	}
	return strings.Join(out, ", ")
}

func quoted(args []string) string {
	out := make([]string, len(args))
	for i, a := range args {
		out[i] = a
		if a == "" || strings.ContainsAny(a, " \t\n\"'\\$") {
			out[i] = fmt.Sprintf("%q", a)
		}
	}
	return strings.Join(out, " ")
}

func limits(r *sandboxv1.ResourceLimits) string {
	var out []string
	if v := r.GetCpuMillis(); v > 0 {
		out = append(out, fmt.Sprintf("cpu=%dm", v))
	}
	if v := r.GetMemoryBytes(); v > 0 {
		out = append(out, "memory="+bytesWord(v))
	}
	if v := r.GetPids(); v > 0 {
		out = append(out, fmt.Sprintf("pids=%d", v))
	}
	return strings.Join(out, ", ")
}

func bytesWord(v int64) string {
	for _, unit := range []struct {
		size int64
		name string
	}{{1 << 30, "Gi"}, {1 << 20, "Mi"}, {1 << 10, "Ki"}} {
		if v%unit.size == 0 {
			return fmt.Sprintf("%d%s", v/unit.size, unit.name)
		}
	}
	return fmt.Sprint(v)
}
