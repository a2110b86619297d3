package caller

import (
	"encoding/base64"
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// kind returns what an attempt comes to.
func kind(evidence string, err error) string {
	switch o := suite.NewOutcome("x", "", evidence, err); {
	case o.Evidence != "":
		return "succeeded"
	case o.Broken != "":
		return "broken"
	}
	return "refused"
}

func TestAllowed(t *testing.T) {
	for code, want := range map[codes.Code]string{
		codes.OK: "succeeded", codes.NotFound: "succeeded", codes.AlreadyExists: "succeeded", codes.FailedPrecondition: "succeeded", codes.ResourceExhausted: "succeeded",
		codes.Internal: "succeeded", codes.PermissionDenied: "refused", codes.Unauthenticated: "refused", codes.InvalidArgument: "refused",
		codes.Unavailable: "broken", codes.DeadlineExceeded: "broken",
	} {
		require.Equal(t, want, kind(allowed(status.Error(code, "x"))), code)
	}
	for code, want := range map[int]string{200: "succeeded", 404: "succeeded", 409: "succeeded", 301: "succeeded", 401: "refused", 403: "refused", 400: "refused", 500: "broken", 503: "broken"} {
		require.Equal(t, want, kind(answer{code: code}.allowed()), code)
	}
}

func TestTyped(t *testing.T) {
	for name, c := range map[string]struct {
		answer answer
		err    error
		want   string
	}{
		"typed":      {answer{400, `{"code":3}`}, nil, "refused"},
		"untyped":    {answer{400, "Bad Request"}, nil, "succeeded"},
		"accepted":   {answer{200, "{}"}, nil, "succeeded"},
		"a defect":   {answer{500, `{"code":13}`}, nil, "succeeded"},
		"ended":      {answer{}, errors.New("connection reset"), "refused"},
		"headers":    {answer{431, ""}, nil, "refused"},
		"too large":  {answer{413, `{"code":3}`}, nil, "refused"},
		"a redirect": {answer{301, ""}, nil, "succeeded"},
	} {
		require.Equal(t, c.want, kind(c.answer.typed(c.err)), name)
	}
}

// TestAttempts: every attempt says what it does, and has a name of its own in its group.
func TestAttempts(t *testing.T) {
	for group, attempts := range map[string][]attempt{
		"foreign": foreignCalls(), "rest": restCalls(), "identity": identities(), "components": componentCalls(), "replay": replays(), "malformed": malformed(), "resources": resources(),
	} {
		names := map[string]bool{}
		for _, a := range attempts {
			require.False(t, names[a.name], "%s: %s", group, a.name)
			names[a.name] = true
			require.NotEmpty(t, a.does, a.name)
			require.NotEmpty(t, a.success, a.name)
			require.NotNil(t, a.run, a.name)
		}
		require.NotEmpty(t, names, group)
	}
}

func TestForgeries(t *testing.T) {
	claims := base64.RawURLEncoding.EncodeToString([]byte(`{"sub":"x"}`))
	got := unsigned("aaaa." + claims + ".signature")
	require.True(t, strings.HasSuffix(got, "."+claims+"."), got)
	header, err := base64.RawURLEncoding.DecodeString(strings.Split(got, ".")[0])
	require.NoError(t, err)
	require.Contains(t, string(header), `"none"`)
	require.NotEmpty(t, unsigned("no token"))
	require.Len(t, nestedMessages(0), 2)
	deep := nestedMessages(4)
	require.Equal(t, byte(0x1a), deep[0])
}

func TestContains(t *testing.T) {
	s := &mesh.Scene{Hostile: &mesh.Tenant{Namespace: "own"}}
	require.Equal(t, "refused", kind(contains(s, []*sandboxv1.Sandbox{{Namespace: "own", Name: "a"}})))
	require.Equal(t, "succeeded", kind(contains(s, []*sandboxv1.Sandbox{{Namespace: "own", Name: "a"}, {Namespace: "other", Name: "b"}})))
}
