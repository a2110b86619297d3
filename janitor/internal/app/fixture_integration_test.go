//go:build integration

package app_test

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/anypb"

	janitorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/janitor/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	fsb "github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// foreignAgent is an agent that another cluster's kubelet runs on the node.
const foreignAgent = "16fd2706-8baf-433b-82eb-8c7fada847da"

// runtimeState is where the OCI runtime keeps its state of containers.
const runtimeState = "/run/containerd/runc/" + ctrd.DefaultNamespace

// slotsInAShim is the number of containers that share a shim, as the slots of an agent do.
const slotsInAShim = 25

// fixtures creates containers of all kinds, as agents, accidents and other programs leave them on a node.
type fixtures struct {
	*testEnv

	// alive is the uid of an agent that lives all the time; going are agents that are deleted first and second; old and renewed are
	// the uids of a Pod that is recreated under its name.
	alive, old, renewed string
	going               [2]string
	made                int
	groups              map[string][]string // by agent: the containers that started a shim
	members             map[string]int
	orphans, kept       []*fixture
}

// ended is the kind of containers whose process has ended.
const ended = "stopped"

// fixture is one container.
type fixture struct {
	thing
	kind string
	// born is when its first process was started.
	born string
	// fall turns it into an orphan behind the mesh's back; nil if the end of its agent does. wave is when.
	fall func()
	wave int
	// reason is what the janitor reports while it is kept; unspecified for none.
	reason janitorv1.Reason
}

func (w *testEnv) fixtures() *fixtures {
	w.t.Helper()
	m := &fixtures{testEnv: w, groups: map[string][]string{}, members: map[string]int{}}
	m.alive, m.going[0], m.going[1], m.old = w.pod("agent-alive"), w.pod("agent-first"), w.pod("agent-second"), w.pod("agent-recreated")
	w.deletePod("agent-recreated")
	m.renewed = w.pod("agent-recreated")
	return m
}

// identity returns that of a new sandbox.
func (m *fixtures) identity(agent string) fsb.Identity {
	m.made++
	return claimed(fmt.Sprintf("s%d", m.made), agent)
}

// container creates a container; most were slots and share a shim with others of their agent.
func (m *fixtures) container(id fsb.Identity, change ...func(*blueprint)) thing {
	m.t.Helper()
	f := blueprint{id: id.ContainerID(), labels: id.Labels()}
	if id.State == fsb.StateSlot || m.made%10 != 0 {
		f.id = slotID(m.made)
		if m.members[id.AgentUID]%slotsInAShim == 0 {
			m.groups[id.AgentUID] = append(m.groups[id.AgentUID], f.id)
		}
		m.members[id.AgentUID]++
		f.group = m.groups[id.AgentUID][len(m.groups[id.AgentUID])-1]
	}
	for _, c := range change {
		c(&f)
	}
	return m.make(f)
}

func state(s verdict.Container) func(*blueprint) { return func(f *blueprint) { f.state = s } }

func label(key, value string) func(*blueprint) {
	return func(f *blueprint) {
		f.labels = maps.Clone(f.labels)
		if f.labels[key] = value; value == "" {
			delete(f.labels, key)
		}
	}
}

// garble makes a container's record and its OCI spec unreadable.
func (m *fixtures) garble(x thing) {
	m.t.Helper()
	_, err := m.Client.ContainerService().Update(m.t.Context(), containers.Container{ID: x.id, Spec: &anypb.Any{TypeUrl: "spec", Value: []byte("{")}}, "spec")
	require.NoError(m.t, err)
}

func tornRecord(f *blueprint) { f.record = []byte{0xff, 0xff} }

// orphan creates the n-th orphan.
func (m *fixtures) orphan(n, wave int) *fixture {
	m.t.Helper()
	gone := m.going[wave]
	id := m.identity(gone)
	s := &fixture{wave: wave}
	m.sandbox(id) // healthy until its agent is gone
	ofGone := []struct {
		kind string
		make func() thing
	}{
		{kind: "its agent is gone", make: func() thing { return m.container(id) }},
		{kind: "slot of a gone agent", make: func() thing { return m.container(fsb.Identity{AgentUID: gone, Pool: "p", State: fsb.StateSlot}) }},
		{kind: "created, its agent is gone", make: func() thing { return m.container(id, state(verdict.Created)) }},
		{kind: "stopped, its agent is gone", make: func() thing { return m.container(id, state(verdict.Stopped)) }},
		{kind: "record alone, its agent is gone", make: func() thing { return m.container(id, state(verdict.NoTask)) }},
		{kind: "never written, its agent is gone", make: func() thing { return m.container(id, label(fsb.KeyPersisted, "")) }},
		{kind: "labels malformed, its agent is gone", make: func() thing { return m.container(id, label(fsb.KeyAttempt, "one")) }},
		{kind: "record and spec unreadable, its agent is gone", make: func() thing { x := m.container(id, tornRecord); m.garble(x); return x }},
		{kind: "lost its record", make: func() thing { x := m.container(id); s.fall = func() { m.loseRecord(x) }; return x }},
		{kind: "half removed", make: func() thing { return m.half(gone) }},
		{kind: "of a Pod that was recreated", make: func() thing { id.AgentUID = m.old; return m.container(id) }},
	}
	if n%15 < len(ofGone) {
		s.kind, s.thing = ofGone[n%15].kind, ofGone[n%15].make()
	} else {
		id = m.identity(m.alive)
		m.fallen(s, n%15-len(ofGone), id)
	}
	s.born = started(s.pid)
	m.orphans = append(m.orphans, s)
	return s
}

// fallen creates a container of a living agent whose Sandbox will no longer mean it.
func (m *fixtures) fallen(s *fixture, n int, id fsb.Identity) {
	m.t.Helper()
	written := m.sandbox(id)
	reassign := func(other fsb.Identity) {
		written.SetAssignment(assignment(other))
		require.NoError(m.t, m.admin.Update(m.t.Context(), written))
	}
	switch n {
	case 0:
		s.kind, s.fall = "its Sandbox is absent", func() { m.strip(written) }
	case 1:
		s.kind, s.fall = "another Sandbox has its name", func() {
			m.strip(written)
			other := id
			other.SandboxUID = uuid.NewString()
			m.unassigned(other)
		}
	case 2:
		s.kind, s.fall = "its attempt is over", func() { later := id; later.Attempt++; reassign(later) }
	default:
		s.kind, s.fall = "assigned elsewhere", func() { other := id; other.AgentUID = uuid.NewString(); reassign(other) }
	}
	s.thing = m.container(id)
}

// loseRecord deletes the record of a running container.
func (m *fixtures) loseRecord(x thing) {
	m.t.Helper()
	require.NoError(m.t, m.Client.ContainerService().Delete(m.t.Context(), x.id))
}

// half is what is left of a container whose removal was interrupted after its record was deleted, or was done with containerd's tools.
func (m *fixtures) half(owner string) thing {
	m.t.Helper()
	id := uuid.NewString() + "-1"
	m.snapshot(id)
	m.fifo(id)
	m.mount(id)
	m.cgroup(id)
	m.log(id, owner)
	return thing{id: id}
}

// keep creates the n-th container that must not be removed.
func (m *fixtures) keep(n int) *fixture {
	m.t.Helper()
	s := &fixture{reason: janitorv1.Reason_REASON_ASSIGNED}
	id := m.identity(m.alive)
	if theirs := n%12 - 6; theirs >= 0 {
		m.keepOdd(s, theirs, n/12, id)
	} else {
		m.keepPlain(s, n%12, id)
	}
	s.born = started(s.pid)
	m.kept = append(m.kept, s)
	return s
}

// keepPlain creates one of the containers that agents normally have.
func (m *fixtures) keepPlain(s *fixture, n int, id fsb.Identity) {
	m.t.Helper()
	switch n {
	case 0:
		s.kind = "healthy"
		m.sandbox(id)
		s.thing = m.container(id)
	case 1:
		s.kind, s.reason = "slot", janitorv1.Reason_REASON_SLOT_OF_AGENT
		s.thing = m.container(fsb.Identity{AgentUID: m.alive, Pool: "p", State: fsb.StateSlot})
	case 2:
		s.kind, s.reason = "not written yet", janitorv1.Reason_REASON_NOT_PERSISTED
		s.thing = m.container(id, label(fsb.KeyPersisted, ""))
	case 3:
		s.kind = ended
		m.sandbox(id)
		s.thing = m.container(id, state(verdict.Stopped))
	case 4:
		s.kind, s.reason = "ahead of its Sandbox", janitorv1.Reason_REASON_CREATE_IN_FLIGHT
		m.sandbox(id)
		id.Attempt++
		s.thing = m.container(id, state(verdict.Created))
	default:
		s.kind, s.reason = "being deleted", janitorv1.Reason_REASON_SANDBOX_TERMINATING
		require.NoError(m.t, m.admin.Delete(m.t.Context(), m.sandbox(id)))
		s.thing = m.container(id)
	}
}

// keepOdd creates one that belongs to others, or has no obvious owner.
func (m *fixtures) keepOdd(s *fixture, n, turn int, id fsb.Identity) {
	m.t.Helper()
	nobodys := id
	nobodys.AgentUID = uuid.NewString()
	malformed := []func(*blueprint){
		label(fsb.KeyAttempt, "one"), label(fsb.KeyAttempt, ""), label(fsb.KeySandboxName, ""), label(fsb.KeySandboxUID, ""), label(fsb.KeyState, fsb.StateSlot),
		label(fsb.KeyState, "asleep"), label(fsb.KeyAgentUID, ""), func(f *blueprint) { f.id, f.group = id.SandboxUID+"-7", "" },
	}
	switch n {
	case 0:
		s.kind, s.reason = "labels do not add up", janitorv1.Reason_REASON_UNIDENTIFIED
		s.thing = m.container(id, malformed[turn%len(malformed)])
	case 1:
		s.kind, s.reason = "not managed", janitorv1.Reason_REASON_UNSPECIFIED
		s.thing = m.container(nobodys, label(fsb.KeyManaged, ""))
	case 2:
		s.kind, s.reason = "managed by another word", janitorv1.Reason_REASON_UNSPECIFIED
		s.thing = m.container(nobodys, label(fsb.KeyManaged, "yes"))
	case 3:
		s.kind, s.reason = "another cluster's", janitorv1.Reason_REASON_ANOTHER_CLUSTER
		id.AgentUID = foreignAgent
		s.thing = m.container(id)
	case 4:
		s.kind = "record and spec unreadable"
		m.sandbox(id)
		s.thing = m.container(id, tornRecord)
		m.garble(s.thing)
	default:
		s.kind = "of the Pod that was recreated"
		id.AgentUID = m.renewed
		m.sandbox(id)
		s.thing = m.container(id)
	}
}

// fall turns the fixtures of a wave into orphans, and deletes the agents' Pod of the wave.
func (m *fixtures) fall(wave int) {
	m.t.Helper()
	for _, s := range m.orphans {
		if s.wave == wave && s.fall != nil {
			s.fall()
		}
	}
	m.deletePod([]string{"agent-first", "agent-second"}[wave])
}

// remaining returns the orphans of which something is left, and what.
func (m *fixtures) remaining() map[string][]string {
	m.t.Helper()
	left := m.left()
	out := map[string][]string{}
	for _, s := range m.orphans {
		for _, what := range []string{"container ", "snapshot ", "fifos ", "mount ", "cgroup ", "log ", "bundle "} {
			if left[what+s.id] {
				out[s.id] = append(out[s.id], what+"of one: "+s.kind)
			}
		}
		if exists(filepath.Join(runtimeState, s.id)) {
			out[s.id] = append(out[s.id], "runtime's state of one: "+s.kind)
		}
		if s.pid > 0 && started(s.pid) == s.born && lives(s.pid) {
			out[s.id] = append(out[s.id], "process of one: "+s.kind)
		}
	}
	return out
}

// records returns the ids of all containers on the node.
func (m *fixtures) records() []string {
	m.t.Helper()
	list, err := m.Client.ContainerService().List(m.t.Context())
	require.NoError(m.t, err)
	out := make([]string, len(list))
	for i, c := range list {
		out[i] = c.ID
	}
	slices.Sort(out)
	return out
}

// requireUntouched requires that the kept containers exist, with everything that belongs to them and with the same processes.
func (m *fixtures) requireUntouched() {
	m.t.Helper()
	left := m.left()
	for _, s := range m.kept {
		require.True(m.t, left["container "+s.id], "%s: %s", s.kind, s.id)
		require.Equal(m.t, s.pid, m.pid(s.id), "%s never blinked", s.kind)
		require.Equal(m.t, s.born, started(s.pid), "%s never blinked", s.kind)
		for _, what := range []string{"snapshot ", "fifos ", "log "} {
			require.True(m.t, left[what+s.id], "%sof one: %s", what, s.kind)
		}
		if s.pid > 0 && s.kind != ended {
			require.True(m.t, left["cgroup "+s.id] && lives(s.pid), "%s: cgroup", s.kind)
		}
		_, err := os.Stat(m.LogRoot + "/" + s.id + "/" + ctrd.OutputFile)
		require.NoError(m.t, err)
	}
}
