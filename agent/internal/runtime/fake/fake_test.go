package fake_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/conformance"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/fake"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func setup(t *testing.T) conformance.Setup {
	t.Helper()
	return conformance.Setup{
		Runtime: fake.New(map[string]fake.Image{
			"docker.io/library/busybox:test": {Local: true}, "docker.io/library/nouser:test": {Local: true, NoUser: true},
			"docker.io/library/other:test": {Local: true}, "docker.io/library/broken:test": {Broken: true}, "localhost:1/away:1": {Away: true},
		}),
		Image: "busybox:test", OtherImage: "other:test", MissingImage: "localhost:1/nope:1", AwayImage: "localhost:1/away:1",
		UnknownUserImage: "nouser:test", BrokenImage: "broken:test", LogRoot: t.TempDir(), KeepsAlive: true,
	}
}

func TestConformance(t *testing.T) { conformance.Run(t, setup) }

func TestSlotConformance(t *testing.T) { conformance.RunSlots(t, setup) }
