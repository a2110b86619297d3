package raw_test

import (
	"encoding/json"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/raw"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func encode(t *testing.T, s *specs.Spec) []byte {
	t.Helper()
	out, err := json.Marshal(s)
	require.NoError(t, err)
	return out
}

func TestUngrouped(t *testing.T) {
	spec := &specs.Spec{
		Process: &specs.Process{Args: []string{"sleep"}}, Linux: &specs.Linux{
			CgroupsPath: "/a/b", Namespaces: []specs.LinuxNamespace{{Type: specs.PIDNamespace}, {Type: specs.UserNamespace}},
			UIDMappings: []specs.LinuxIDMapping{{HostID: 1 << 28, Size: 65536}}, GIDMappings: []specs.LinuxIDMapping{{HostID: 1 << 28, Size: 65536}},
		},
		Annotations: map[string]string{"io.containerd.runc.v2.group": "g", "io.kubernetes.cri.sandbox-id": "s", "kept": "yes"},
	}
	out, err := raw.Ungrouped(encode(t, spec))
	require.NoError(t, err)
	spec.Annotations = map[string]string{"kept": "yes"}
	spec.Linux = &specs.Linux{CgroupsPath: "/a/b", Namespaces: []specs.LinuxNamespace{{Type: specs.PIDNamespace}}}
	require.JSONEq(t, string(encode(t, spec)), string(out), "nothing else changes")
	for _, bad := range []string{"", "[]", "{}", `{"process":{}}`} {
		_, err := raw.Ungrouped([]byte(bad))
		require.Error(t, err, bad)
	}
}

func TestRenamed(t *testing.T) {
	for before, after := range map[string]string{
		"/kubepods/pod1/fast-sandbox-x": "/kubepods/pod1/new", "kubepods-pod1.slice:fast-sandbox:x": "kubepods-pod1.slice:fast-sandbox:new", "": "",
	} {
		s, err := raw.Renamed(encode(t, &specs.Spec{Process: &specs.Process{}, Linux: &specs.Linux{CgroupsPath: before}}), "new")
		require.NoError(t, err)
		require.Equal(t, after, s.Linux.CgroupsPath)
	}
	_, err := raw.Renamed([]byte("no"), "new")
	require.Error(t, err)
}
