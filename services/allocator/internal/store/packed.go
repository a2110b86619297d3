package store

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"time"
	"unique"

	"github.com/klauspost/compress/s2"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// packed is a custom resource as the store keeps it: compressed, with what every change and list needs of it. There may be 100,000, and
// as Go structures each takes 2.6 KiB in 30 pieces of memory, which the garbage collector visits in every cycle. It is immutable.
type packed struct {
	text []byte // JSON, compressed by a codec; of an outline, metadata in protobuf

	// outline is set if spec and status are not known. Then pool and phase are empty and recorded is false, whatever the resource says.
	outline bool

	version   string // resourceVersion
	uid       string // the effective one
	objectUID types.UID
	requestID string
	pool      string // of the spec
	phase     v1alpha1.Phase
	assigned  identity.Fence // the container of the assignment; zero without one
	// recorded is set if the status is written, deleting if the resource is being deleted, abandoned as Abandoned says.
	recorded, deleting, abandoned bool
}

// codec compresses custom resources one by one, with a dictionary of what most of them have in common.
type codec struct{ dictionary *s2.Dict }

// newCodec returns a codec. What one codec has compressed no other can read.
func newCodec() codec {
	raw, err := json.Marshal(typical())
	if err != nil {
		panic(fmt.Sprintf("encoding a typical sandbox: %v", err))
	}
	return codec{s2.MakeDictManual(raw, 0)}
}

// typical returns a sandbox that runs, as allocator and controller write it.
func typical() *v1alpha1.Sandbox {
	const uid = "00000000-0000-4000-8000-000000000000"
	now := time.Unix(1_700_000_000, 0)
	sb := &v1alpha1.Sandbox{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: "sandbox", UID: uid, ResourceVersion: "1", Generation: 1, Finalizers: []string{v1alpha1.Finalizer},
			Labels: map[string]string{v1alpha1.LabelPool: "default", v1alpha1.LabelNode: "node"}, CreationTimestamp: metav1.NewTime(now),
			Annotations: map[string]string{
				v1alpha1.AnnotationSandboxUID: uid, v1alpha1.AnnotationRequestID: uid, v1alpha1.AnnotationRequestDigest: uid,
				v1alpha1.AnnotationCreateTime: now.UTC().Format(time.RFC3339Nano),
			},
		},
		Spec: v1alpha1.SandboxSpec{
			Image: "docker.io/library/python:3.13", Command: []string{"python3"}, Envs: []v1alpha1.EnvVar{{Name: "NAME", Value: "value"}, {Name: "NAME", Value: "value"}},
			ExposedPorts: []int32{8080}, PoolRef: "default", ConsistencyMode: v1alpha1.ConsistencyModeFast,
			FailurePolicy: v1alpha1.FailurePolicyManual, Network: v1alpha1.NetworkModeAgent,
			RecoveryTimeoutSeconds: ptr.To[int32](30), TerminationGracePeriodSeconds: ptr.To[int64](10),
		},
		Status: v1alpha1.SandboxStatus{
			Phase: v1alpha1.PhaseRunning, ObservedGeneration: 1, AssignedPod: "agent", NodeName: "node", SandboxID: uid + "-1", Endpoints: []string{"10.0.0.1:8080"},
			Attempt: 1, StartTime: &metav1.MicroTime{Time: now}, StartPath: v1alpha1.StartPathSlot,
		},
	}
	sb.SetAssignment(&v1alpha1.Assignment{AgentPod: "agent", AgentUID: uid, NodeName: "node", AgentAddress: "10.0.0.1:5758", SandboxUID: uid, Attempt: 1})
	for _, t := range []string{v1alpha1.ConditionReady, v1alpha1.ConditionScheduled} {
		sb.Status.Conditions = append(sb.Status.Conditions, metav1.Condition{
			Type: t, Status: metav1.ConditionTrue, Reason: "Running", LastTransitionTime: metav1.NewTime(now), ObservedGeneration: 1,
		})
	}
	return sb
}

// pack returns a custom resource as it is kept. It keeps nothing of the argument, and drops what no component of the allocator reads.
func (c codec) pack(sb *v1alpha1.Sandbox) *packed {
	light := *sb
	light.ManagedFields = nil
	if _, ok := sb.Annotations[corev1.LastAppliedConfigAnnotation]; ok {
		light.Annotations = maps.Clone(sb.Annotations)
		delete(light.Annotations, corev1.LastAppliedConfigAnnotation)
	}
	raw, err := json.Marshal(&light)
	if err != nil { // it was decoded from JSON
		panic(fmt.Sprintf("encoding sandbox %s/%s: %v", sb.Namespace, sb.Name, err))
	}
	p := index(sb)
	p.text = bytes.Clone(c.dictionary.Encode(nil, raw))
	p.pool, p.phase, p.recorded = shared(sb.Spec.PoolRef), v1alpha1.Phase(shared(string(sb.EffectiveStatus().Phase))), sb.Status.Phase != ""
	return p
}

// packOutline returns the metadata of a custom resource as it is kept until the whole is known. It takes little time: that is for the
// start, and not compressed.
func packOutline(sb *v1alpha1.Sandbox) *packed {
	light := sb.ObjectMeta
	light.ManagedFields = nil
	raw, err := light.Marshal()
	if err != nil {
		panic(fmt.Sprintf("encoding the metadata of sandbox %s/%s: %v", sb.Namespace, sb.Name, err))
	}
	p := index(sb)
	p.text, p.outline = raw, true
	return p
}

// index returns what changes and lists need of the metadata of a custom resource.
func index(sb *v1alpha1.Sandbox) *packed {
	p := &packed{deleting: sb.DeletionTimestamp != nil, abandoned: Abandoned(sb)}
	// One piece of memory for all.
	uid, request := sb.EffectiveUID(), sb.Annotations[v1alpha1.AnnotationRequestID]
	all := sb.ResourceVersion + uid + string(sb.UID) + request
	next := func(s string) string {
		head := all[:len(s)]
		all = all[len(s):]
		return head
	}
	p.version, p.uid, p.objectUID, p.requestID = next(sb.ResourceVersion), next(uid), types.UID(next(string(sb.UID))), next(request)
	if a, err := sb.Assignment(); err == nil && a != nil {
		p.assigned = identity.Fence{SandboxUID: strings.Clone(a.SandboxUID), Attempt: a.Attempt, AgentUID: shared(a.AgentUID)}
		if a.SandboxUID == p.uid {
			p.assigned.SandboxUID = p.uid
		}
	}
	return p
}

// unpack returns the custom resource, or its metadata alone if no more is known. The caller owns it.
func (c codec) unpack(p *packed) *v1alpha1.Sandbox {
	sb := &v1alpha1.Sandbox{}
	var err error
	if p.outline {
		err = sb.ObjectMeta.Unmarshal(p.text)
	} else if raw, failed := c.dictionary.Decode(nil, p.text); failed != nil {
		err = failed
	} else {
		err = json.Unmarshal(raw, sb)
	}
	if err != nil { // pack wrote it
		panic(fmt.Sprintf("decoding sandbox %s of the store: %v", p.uid, err))
	}
	return sb
}

// shared returns a string that shares its memory with equal ones. Those that differ for each sandbox are not worth that: an entry of
// the table costs more than a copy.
func shared(s string) string {
	if s == "" {
		return ""
	}
	return unique.Make(s).Value()
}
