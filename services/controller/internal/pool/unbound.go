package pool

import (
	"fmt"
	"regexp"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

const (
	// reasonUnbound is the reason of the conditions of a pool in a namespace in which the controller may not run agents.
	reasonUnbound = "NamespaceNotBound"
	// poolRole is the ClusterRole that the controller needs in each namespace with a pool.
	poolRole = "fast-sandbox-pool-namespace"
)

// unboundError is the answer of an API server's authorizer, with what an administrator has to do.
type unboundError struct {
	cause           error
	namespace, user string
}

// Error implements error.
func (e *unboundError) Error() string {
	subject := "--user " + e.user
	if account, ok := strings.CutPrefix(e.user, "system:serviceaccount:"); ok {
		subject = "--serviceaccount " + account
	}
	return fmt.Sprintf("the controller may not run agents in namespace %s; an administrator of the cluster permits it with "+
		"`kubectl create rolebinding fast-sandbox-controller --namespace %s --clusterrole %s %s`: %v", e.namespace, e.namespace, poolRole, subject, e.cause)
}

// Unwrap returns the API server's answer.
func (e *unboundError) Unwrap() error { return e.cause }

// refused matches the answer of the authorizer. Admission refuses with the same status code in other words.
var refused = regexp.MustCompile(`is forbidden: User "([^"]+)" cannot `)

// asUnbound returns an error of a call in a pool's namespace, as an unboundError if the authorizer refused the call.
func asUnbound(err error, namespace string) error {
	if !apierrors.IsForbidden(err) {
		return err
	}
	user := refused.FindStringSubmatch(err.Error())
	if user == nil {
		return err
	}
	return &unboundError{cause: err, namespace: namespace, user: user[1]}
}
