package identity_test

import (
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

func TestKeysEqualTheAPI(t *testing.T) {
	require.Equal(t, []string{
		v1alpha1.LabelManaged, v1alpha1.LabelAgentUID, v1alpha1.LabelPool, v1alpha1.LabelSandboxNamespace,
		v1alpha1.LabelSandboxName, v1alpha1.LabelSandboxUID, v1alpha1.LabelAttempt, v1alpha1.LabelState,
		v1alpha1.LabelPersisted, v1alpha1.LabelAgentProcess, v1alpha1.StateSlot, v1alpha1.StateClaimed,
	}, []string{
		identity.KeyManaged, identity.KeyAgentUID, identity.KeyPool, identity.KeySandboxNamespace,
		identity.KeySandboxName, identity.KeySandboxUID, identity.KeyAttempt, identity.KeyState,
		identity.KeyPersisted, identity.KeyAgentProcess, identity.StateSlot, identity.StateClaimed,
	})
}

func TestLabelsRoundTrip(t *testing.T) {
	word := rapid.StringMatching(`[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?`)
	rapid.Check(t, func(t *rapid.T) {
		want := identity.Identity{AgentUID: word.Draw(t, "agent"), Pool: word.Draw(t, "pool"), State: identity.StateSlot}
		if rapid.Bool().Draw(t, "claimed") {
			want = identity.Identity{
				Namespace: word.Draw(t, "ns"), Name: word.Draw(t, "name"), SandboxUID: word.Draw(t, "uid"),
				Attempt: rapid.Int64Min(1).Draw(t, "attempt"), AgentUID: want.AgentUID, Pool: want.Pool,
				State: identity.StateClaimed, Persisted: rapid.Bool().Draw(t, "persisted"),
			}
		}
		got, err := identity.Parse(want.Labels())
		require.NoError(t, err)
		require.Equal(t, want, got)
	})
}

func TestParseRefusesInconsistentLabels(t *testing.T) {
	good := identity.Identity{
		Namespace: "ns", Name: "n", SandboxUID: "u", Attempt: 2, AgentUID: "a", Pool: "p", State: identity.StateClaimed,
	}
	require.Equal(t, "u-2", good.ContainerID())
	tests := []struct {
		name       string
		key, value string
		want       string
	}{
		{"no agent", identity.KeyAgentUID, "", identity.KeyAgentUID},
		{"no namespace", identity.KeySandboxNamespace, "", identity.KeySandboxNamespace},
		{"no name", identity.KeySandboxName, "", identity.KeySandboxName},
		{"no uid", identity.KeySandboxUID, "", identity.KeySandboxUID},
		{"attempt zero", identity.KeyAttempt, "0", identity.KeyAttempt},
		{"attempt not a number", identity.KeyAttempt, "two", identity.KeyAttempt},
		{"unknown state", identity.KeyState, "half", identity.KeyState},
		{"slot with a sandbox", identity.KeyState, identity.StateSlot, "on a slot"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			labels := good.Labels()
			labels[tt.key] = tt.value
			_, err := identity.Parse(labels)
			require.True(t, errdefs.IsInvalidArgument(err), "%v", err)
			require.ErrorContains(t, err, tt.want)
		})
	}
	_, err := identity.Parse(map[string]string{identity.KeyManaged: "yes"})
	require.True(t, errdefs.IsNotFound(err), "container of another system: %v", err)
}

func TestIsContainerID(t *testing.T) {
	const uid = "0f8fad5b-d9cb-469f-a165-70867728950e"
	for id, want := range map[string]bool{
		uid + "-1": true, uid + "-4096": true, "slot.0123456789abcdef0123": true,
		uid: false, uid + "-": false, uid + "-0": false, uid + "-01": false, uid + "-+1": false, uid + "--1": false, uid + "-x": false,
		"0F8FAD5B-d9cb-469f-a165-70867728950e-1": false, "0f8fad5bd-9cb-469f-a165-70867728950e-1": false, "0f8fad5b-d9cb-469fa-165-70867728950e-1": false,
		"slot.": false, "slot.0123": false, "slot.0123456789abcdef012z": false, "": false, "u-1": false, "fsb-test-1": false,
		"4f5e9c1b8f7d3a2c4f5e9c1b8f7d3a2c4f5e9c1b8f7d3a2c4f5e9c1b8f7d3a2c": false,
	} {
		require.Equal(t, want, identity.IsContainerID(id), id)
	}
	require.True(t, identity.IsContainerID(identity.Identity{SandboxUID: uid, Attempt: 12}.ContainerID()))
}

// TestParseNamesEveryProblem: an operator mends the labels once.
func TestParseNamesEveryProblem(t *testing.T) {
	_, err := identity.Parse(map[string]string{identity.KeyManaged: "true", identity.KeyState: identity.StateClaimed})
	require.True(t, errdefs.IsInvalidArgument(err))
	for _, key := range []string{identity.KeyAgentUID, identity.KeySandboxNamespace, identity.KeySandboxName, identity.KeySandboxUID, identity.KeyAttempt} {
		require.ErrorContains(t, err, key)
	}
	require.NotContains(t, err.Error(), identity.KeyPool, "a pool is not needed")
}

// TestSlotHasNoSandbox: each label of a sandbox on a slot is refused, and a slot of its own is not.
func TestSlotHasNoSandbox(t *testing.T) {
	slot := identity.Identity{AgentUID: "a", Pool: "p", State: identity.StateSlot}
	require.Equal(t, map[string]string{
		identity.KeyManaged: "true", identity.KeyAgentUID: "a", identity.KeyPool: "p", identity.KeyState: identity.StateSlot,
	}, slot.Labels())
	for _, key := range []string{identity.KeySandboxNamespace, identity.KeySandboxName, identity.KeySandboxUID, identity.KeyAttempt} {
		labels := slot.Labels()
		labels[key] = "1"
		_, err := identity.Parse(labels)
		require.ErrorContains(t, err, key+" is set on a slot")
	}
	require.Equal(t, identity.Fence{AgentUID: "a"}, slot.Fence())
}

// TestFits: the id of a container is a second witness of its labels.
func TestFits(t *testing.T) {
	claimed := identity.Identity{SandboxUID: "u", Attempt: 2, State: identity.StateClaimed}
	slot := identity.Identity{State: identity.StateSlot}
	tests := map[string]struct {
		identity identity.Identity
		id       string
		want     bool
	}{
		"a cold container":          {claimed, "u-2", true},
		"another attempt's":         {claimed, "u-1", false},
		"another sandbox's":         {claimed, "v-2", false},
		"a claimed slot":            {claimed, identity.SlotID("x"), true},
		"a slot":                    {slot, identity.SlotID("x"), true},
		"a slot with a sandbox's":   {slot, "u-2", false},
		"a slot that has no prefix": {slot, "-0", false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) { require.Equal(t, test.want, test.identity.Fits(test.id)) })
	}
}

// TestEveryFenceHasItsOwnContainerID, also when uids end in digits.
func TestEveryFenceHasItsOwnContainerID(t *testing.T) {
	uid := rapid.StringMatching(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`)
	rapid.Check(t, func(t *rapid.T) {
		a := identity.Fence{SandboxUID: uid.Draw(t, "a"), Attempt: rapid.Int64Min(1).Draw(t, "attempt")}
		b := identity.Fence{SandboxUID: uid.Draw(t, "b"), Attempt: rapid.Int64Min(1).Draw(t, "attempt")}
		if rapid.Bool().Draw(t, "same sandbox") {
			b.SandboxUID = a.SandboxUID
		}
		require.Equal(t, a == b, a.ContainerID() == b.ContainerID())
		require.True(t, identity.IsContainerID(a.ContainerID()), a.ContainerID())
		require.False(t, identity.IsSlotID(a.ContainerID()), a.ContainerID())
	})
}

// TestParsedIdentityIsExact: whatever labels have an identity, the labels of that identity have the same one, and labels of
// others change nothing.
func TestParsedIdentityIsExact(t *testing.T) {
	values := map[string]*rapid.Generator[string]{
		identity.KeyManaged: rapid.Just("true"), identity.KeyAgentUID: rapid.SampledFrom([]string{"a", "a", "a", ""}), identity.KeyPool: rapid.SampledFrom([]string{"", "p"}),
		identity.KeySandboxNamespace: rapid.SampledFrom([]string{"ns", ""}), identity.KeySandboxName: rapid.SampledFrom([]string{"n", ""}),
		identity.KeySandboxUID: rapid.SampledFrom([]string{"u", ""}), identity.KeyAttempt: rapid.SampledFrom([]string{"1", "7", "", "0", "-1", "1.5"}),
		identity.KeyAgentProcess: rapid.SampledFrom([]string{"", "process"}),
		identity.KeyState:        rapid.SampledFrom([]string{identity.StateSlot, identity.StateClaimed, identity.StateClaimed, ""}),
	}
	rapid.Check(t, func(t *rapid.T) {
		labels := map[string]string{"io.kubernetes.pod.name": "p"}
		for key, value := range values {
			labels[key] = value.Draw(t, key)
		}
		if labels[identity.KeyState] == identity.StateClaimed {
			labels[identity.KeyPersisted] = rapid.SampledFrom([]string{"true", "false", ""}).Draw(t, "persisted")
		}
		got, err := identity.Parse(labels)
		if err != nil {
			require.True(t, errdefs.IsInvalidArgument(err))
			require.Zero(t, got, "inconsistent labels have no identity")
			return
		}
		for key, value := range got.Labels() {
			require.Equal(t, value, labels[key], key)
		}
		again, err := identity.Parse(got.Labels())
		require.NoError(t, err)
		require.Equal(t, got, again)
		require.Equal(t, got.State == identity.StateClaimed, got.Fits(got.ContainerID()))
	})
}
