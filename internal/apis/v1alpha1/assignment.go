package v1alpha1

import (
	"encoding/json"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Assignment is the agent that runs a Sandbox. It is stored as JSON in AnnotationAssignment, so that all of it is written
// at once.
type Assignment struct {
	// AgentPod is the name of the agent Pod.
	AgentPod string `json:"agentPod"`
	// AgentUID is the uid of the agent Pod.
	AgentUID string `json:"agentUID"`
	// NodeName is the node of the agent Pod.
	NodeName string `json:"nodeName"`
	// AgentAddress is the address (host:port) of the agent's gRPC server.
	AgentAddress string `json:"agentAddress"`
	// SandboxUID is the uid of the Sandbox.
	SandboxUID string `json:"sandboxUID"`
	// Attempt is the attempt that the assignment is for.
	Attempt int64 `json:"attempt"`
	// Started is what the agent reported when the process started. Only the allocator sets it, in the first write of a
	// sandbox that it created on the fast path: such a sandbox is Running for every reader from then on, even if its agent is
	// lost before a controller has seen the resource.
	Started *Started `json:"started,omitempty"`
	// Superseded are earlier attempts to create a sandbox of this name whose outcome was not known. The sandbox is gone only
	// when their containers are, too.
	Superseded []Superseded `json:"superseded,omitempty"`
}

// Superseded is an attempt to create a sandbox whose agent did not say what became of it.
type Superseded struct {
	// AgentPod is the name of the agent Pod.
	AgentPod string `json:"agentPod"`
	// AgentUID is the uid of the agent Pod.
	AgentUID string `json:"agentUID"`
	// AgentAddress is the address (host:port) of the agent's gRPC server.
	AgentAddress string `json:"agentAddress"`
	// SandboxUID is the uid of the sandbox that was attempted.
	SandboxUID string `json:"sandboxUID"`
	// Attempt is the number of the attempt.
	Attempt int64 `json:"attempt"`
}

// Started is an agent's report that the process of a sandbox has started.
type Started struct {
	// SandboxID is the id of the container in containerd.
	SandboxID string `json:"sandboxID"`
	// StartTime is when the process started.
	StartTime metav1.MicroTime `json:"startTime"`
	// StartPath is how the container came to run.
	StartPath StartPath `json:"startPath,omitempty"`
	// Endpoints are the addresses (host:port) of the exposed ports.
	Endpoints []string `json:"endpoints,omitempty"`
}

// EffectiveStatus returns the status with what the assignment knows: that the sandbox runs, if an agent acknowledged its start and
// no controller has written a status yet. It shares memory with s.
func (s *Sandbox) EffectiveStatus() SandboxStatus {
	st := s.Status
	if st.Phase != "" {
		return st
	}
	a, err := s.Assignment()
	if err != nil || a == nil || a.Started == nil {
		return st
	}
	st.Phase, st.AssignedPod, st.NodeName, st.Attempt = PhaseRunning, a.AgentPod, a.NodeName, a.Attempt
	st.SandboxID, st.Endpoints = a.Started.SandboxID, a.Started.Endpoints
	st.StartPath, st.StartTime = a.Started.StartPath, a.Started.StartTime.DeepCopy()
	return st
}

// EffectiveUID returns the uid that identifies this incarnation of the Sandbox in fences and on containers.
func (s *Sandbox) EffectiveUID() string {
	if uid := s.Annotations[AnnotationSandboxUID]; uid != "" {
		return uid
	}
	return string(s.UID)
}

// Assignment returns the assignment of the Sandbox, or nil if it is not assigned. An annotation that cannot be decoded is
// an error and never means "not assigned": a container may be running.
func (s *Sandbox) Assignment() (*Assignment, error) {
	raw := s.Annotations[AnnotationAssignment]
	if raw == "" {
		return nil, nil
	}
	var a Assignment
	if err := json.Unmarshal([]byte(raw), &a); err != nil {
		return nil, fmt.Errorf("decoding annotation %s: %w", AnnotationAssignment, err)
	}
	if a.AgentUID == "" || a.SandboxUID == "" || a.Attempt < 1 {
		return nil, fmt.Errorf("decoding annotation %s: agentUID, sandboxUID and attempt must be set", AnnotationAssignment)
	}
	return &a, nil
}

// SetAssignment writes the assignment to the annotations. Nil removes it.
func (s *Sandbox) SetAssignment(a *Assignment) {
	if a == nil {
		delete(s.Annotations, AnnotationAssignment)
		return
	}
	raw, err := json.Marshal(a)
	if err != nil { // strings and numbers always marshal
		panic(err)
	}
	if s.Annotations == nil {
		s.Annotations = map[string]string{}
	}
	s.Annotations[AnnotationAssignment] = string(raw)
}
