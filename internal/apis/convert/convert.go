// Package convert translates between the custom resources and the messages of sandbox.v1. Its functions do no I/O, accept
// every value (a value that the other side cannot represent, such as a fraction of a second, is rounded up), share no
// memory between argument and result, and may be called concurrently.
package convert

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// ToProto returns the API's view of a custom resource, which counts as persisted.
func ToProto(s *v1alpha1.Sandbox) *sandboxv1.Sandbox {
	out := &sandboxv1.Sandbox{
		Namespace: s.Namespace, Name: s.Name, Uid: s.EffectiveUID(), Labels: maps.Clone(s.Labels),
		Spec: SpecToProto(&s.Spec), Status: statusToProto(s), CreateTime: createTime(s),
	}
	out.Spec.Pool = s.Pool()
	if s.DeletionTimestamp != nil {
		out.DeleteTime = timestamppb.New(s.DeletionTimestamp.Time)
	}
	return out
}

// createTime returns the time at which a fast create was accepted, or else the creation time of the custom resource, which
// is later.
func createTime(s *v1alpha1.Sandbox) *timestamppb.Timestamp {
	if t, err := time.Parse(time.RFC3339Nano, s.Annotations[v1alpha1.AnnotationCreateTime]); err == nil {
		return timestamppb.New(t)
	}
	if s.CreationTimestamp.IsZero() {
		return nil
	}
	return timestamppb.New(s.CreationTimestamp.Time)
}

// SpecToProto converts a spec.
func SpecToProto(s *v1alpha1.SandboxSpec) *sandboxv1.SandboxSpec {
	out := &sandboxv1.SandboxSpec{
		Image: s.Image, Pool: s.PoolRef, Command: slices.Clone(s.Command), Args: slices.Clone(s.Args),
		KeepAlive: s.KeepAlive, WorkingDir: s.WorkingDir, Ports: slices.Clone(s.ExposedPorts),
		ConsistencyMode: ModeToProto(s.ConsistencyMode), FailurePolicy: policyToProto(s.FailurePolicy),
		Network: networkToProto(s.Network), Resources: LimitsToProto(s.Resources),
	}
	if len(s.Envs) > 0 {
		out.Env = make(map[string]string, len(s.Envs))
		for _, e := range s.Envs {
			out.Env[e.Name] = e.Value
		}
	}
	if s.ExpireTime != nil {
		out.ExpireTime = timestamppb.New(s.ExpireTime.Time)
	}
	if s.ResetRevision != nil {
		out.ResetRevision = timestamppb.New(s.ResetRevision.Time)
	}
	if g := s.TerminationGracePeriodSeconds; g != nil {
		out.TerminationGracePeriod = durationpb.New(time.Duration(*g) * time.Second)
	}
	if r := s.RecoveryTimeoutSeconds; r != nil {
		out.RecoveryTimeout = durationpb.New(time.Duration(*r) * time.Second)
	}
	if t := s.TTLAfterFinished; t != nil {
		out.TtlAfterFinished = durationpb.New(t.Duration)
	}
	return out
}

// SpecFromProto converts a spec. Environment variables are sorted by name.
func SpecFromProto(s *sandboxv1.SandboxSpec) v1alpha1.SandboxSpec {
	out := v1alpha1.SandboxSpec{
		Image: s.GetImage(), PoolRef: s.GetPool(), Command: slices.Clone(s.GetCommand()), Args: slices.Clone(s.GetArgs()),
		KeepAlive: s.GetKeepAlive(), WorkingDir: s.GetWorkingDir(), ExposedPorts: slices.Clone(s.GetPorts()),
		ConsistencyMode: modeFromProto(s.GetConsistencyMode()), FailurePolicy: PolicyFromProto(s.GetFailurePolicy()),
		Network: networkFromProto(s.GetNetwork()), Resources: LimitsFromProto(s.GetResources()),
	}
	for name, value := range s.GetEnv() {
		out.Envs = append(out.Envs, v1alpha1.EnvVar{Name: name, Value: value})
	}
	slices.SortFunc(out.Envs, func(a, b v1alpha1.EnvVar) int { return cmp.Compare(a.Name, b.Name) })
	if t := s.GetExpireTime(); t != nil {
		out.ExpireTime = &metav1.Time{Time: t.AsTime()}
	}
	if t := s.GetResetRevision(); t != nil {
		out.ResetRevision = &metav1.MicroTime{Time: t.AsTime()}
	}
	if d := s.GetTerminationGracePeriod(); d != nil {
		out.TerminationGracePeriodSeconds = ptr.To(ceilSeconds(d.AsDuration()))
	}
	if d := s.GetRecoveryTimeout(); d != nil {
		out.RecoveryTimeoutSeconds = ptr.To(int32(ceilSeconds(d.AsDuration())))
	}
	if d := s.GetTtlAfterFinished(); d != nil {
		out.TTLAfterFinished = &metav1.Duration{Duration: d.AsDuration()}
	}
	return out
}

func ceilSeconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }

func statusToProto(s *v1alpha1.Sandbox) *sandboxv1.SandboxStatus {
	st := s.EffectiveStatus()
	out := &sandboxv1.SandboxStatus{
		Phase: PhaseToProto(st.Phase), AssignedPod: st.AssignedPod, NodeName: st.NodeName, SandboxId: st.SandboxID,
		Endpoints: slices.Clone(st.Endpoints), Attempt: st.Attempt, Reason: st.Reason, Message: st.Message, Persisted: true,
		AcceptedResetRevision: microToProto(st.AcceptedResetRevision), StartTime: microToProto(st.StartTime),
		FinishTime: microToProto(st.FinishTime), StartPath: StartPathToProto(st.StartPath),
	}
	if st.ExitCode != nil {
		out.ExitCode = proto.Int32(*st.ExitCode)
	}
	for _, c := range st.Conditions {
		out.Conditions = append(out.Conditions, &sandboxv1.Condition{
			Type: c.Type, Status: string(c.Status), Reason: c.Reason, Message: c.Message,
			LastTransitionTime: timestamppb.New(c.LastTransitionTime.Time),
		})
	}
	return out
}

func microToProto(t *metav1.MicroTime) *timestamppb.Timestamp {
	if t == nil {
		return nil
	}
	return timestamppb.New(t.Time)
}
