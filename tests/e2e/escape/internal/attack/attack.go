// Package attack is what code in a sandbox tries: to reach the node, the components and other sandboxes. Each attack is an attempt
// of the suite that a process makes on itself, and that does no damage to the node if it succeeds: what it opens for writing
// it does not write, or writes what it has read there. The program `hostile` runs them one by one, each in a process of its own.
//
// The same attacks run in a container without protection, where they succeed: that proves that each notices its success.
package attack

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

// User is who makes an attack inside the sandbox.
type User string

// The users. Both is the zero value.
const (
	Both User = ""
	Root User = "root"
	Mere User = "user"
)

// Attack is one attempt from inside a sandbox.
type Attack struct {
	suite.Attempt
	// By is who makes it.
	By User
	// Once says that it is made in one sandbox only, because its result depends neither on the user nor on how the sandbox was started.
	Once bool
	// NeedsRoommate says that it needs another sandbox of the same agent.
	NeedsRoommate bool
	// Unprovable is why it cannot succeed in the open container, where that does not prove that its check is wrong.
	Unprovable string
	// run returns evidence of its success, or why it was refused.
	run func(e *Env) (evidence string, refused error)
}

// Env is what an attack knows of its surroundings. The harness passes it on as JSON in the variable EnvName.
type Env struct {
	// Canary is the path of a file on the node, and Secret its content. No path within the sandbox leads to it.
	Canary, Secret string
	// Abstract is the name of the abstract socket of a sandbox of the same agent, which answers with Secret.
	Abstract string
	// Neighbor is the address (host:port) of a sandbox of another tenant, and Roommate that of one of the same agent.
	Neighbor, Roommate string
	// Agent and Metrics are the addresses of the agent's ports, and Health is that of the port that it had for probes.
	Agent, Health, Metrics string
	// Kubelet, APIServer, Allocator and Gateway are the addresses of the node's and the mesh's ports.
	Kubelet, APIServer, Allocator, Gateway string
	// Metadata is the address of the cloud's metadata service.
	Metadata string
}

// ReadArg makes the program read the files that its other arguments name, and look for the canary in them.
const ReadArg = "read"

// Read returns the outcome of reading the files.
func Read(e *Env, paths []string) suite.Outcome {
	evidence, err := first(paths, func(path string) (string, error) { return canary(e, path) })
	return suite.NewOutcome(ReadArg, "", evidence, err)
}

// EnvName is the variable that has an Env.
const EnvName = "ESCAPE"

// ParseEnv reads an Env. An empty text is the zero Env.
func ParseEnv(text string) (*Env, error) {
	e := &Env{}
	if text == "" {
		return e, nil
	}
	if err := json.Unmarshal([]byte(text), e); err != nil {
		return nil, fmt.Errorf("reading %s: %w", EnvName, err)
	}
	return e, nil
}

// String returns the JSON.
func (e *Env) String() string {
	raw, err := json.Marshal(e)
	if err != nil { // it has texts alone
		panic(err)
	}
	return string(raw)
}

// All returns all attacks, in the order in which they are made.
func All() []Attack {
	return slices.Concat(mounts(), kernelFiles(), devices(), processes(), supervisor(), descriptors(), namespaces(), privileges(), calls(), sockets(), ports())
}

// For returns the attacks of a user in one of several sandboxes. Those that are made only once are in the first.
func For(user User, first bool) []Attack {
	return slices.DeleteFunc(All(), func(a Attack) bool { return (a.By != Both && a.By != user) || (a.Once && !first) })
}

// Attempts returns the attempts.
func Attempts(attacks []Attack) []suite.Attempt {
	out := make([]suite.Attempt, 0, len(attacks))
	for _, a := range attacks {
		out = append(out, a.Attempt)
	}
	return out
}

// Named returns an attack.
func Named(name string) (Attack, error) {
	all := All()
	if i := slices.IndexFunc(all, func(a Attack) bool { return a.Name == name }); i >= 0 {
		return all[i], nil
	}
	return Attack{}, fmt.Errorf("there is no attack %q", name)
}

// Run makes the attack.
func (a Attack) Run(e *Env) suite.Outcome {
	evidence, err := a.run(e)
	return suite.NewOutcome(a.Name, "", evidence, err)
}

// done returns evidence if a call has succeeded, and its error if it has not.
func done(err error, format string, args ...any) (string, error) {
	if err != nil {
		return "", err
	}
	return fmt.Sprintf(format, args...), nil
}

// reached returns evidence if the kernel has looked at the arguments of a call, which are invalid, so that it does nothing.
func reached(call string, errno unix.Errno) (string, error) {
	switch errno {
	case unix.EPERM, unix.EACCES, unix.ENOSYS:
		return "", errno
	case 0:
		return call + " has succeeded", nil
	default:
		return fmt.Sprintf("the kernel executes %s: %s", call, errno), nil
	}
}

// first returns the evidence of the first try that succeeds, or the errors of all. If one of them could not be made, neither could the attack.
func first[T any](list []T, try func(T) (string, error)) (string, error) {
	var refused []error
	for _, x := range list {
		evidence, err := try(x)
		if evidence != "" {
			return evidence, nil
		}
		if suite.IsBroken(err) {
			return "", err
		}
		if err != nil && len(refused) < maxReasons {
			refused = append(refused, fmt.Errorf("%v: %w", x, err))
		}
	}
	return "", oneLine(errors.Join(refused...))
}

// maxReasons bounds the reasons in one outcome.
const maxReasons = 8

func oneLine(err error) error {
	if err == nil {
		return nil
	}
	return errors.New(strings.ReplaceAll(err.Error(), "\n", "; "))
}
